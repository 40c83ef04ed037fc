"""Private torch APIs, one thin module per concern; each says on which torch versions it was checked."""
