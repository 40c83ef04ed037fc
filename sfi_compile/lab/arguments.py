"""Lists of values in command-line arguments. Imports `lab.errors` only."""

from __future__ import annotations

from sfi_compile.lab.errors import LabError


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """`"2048,8192"` as whole numbers. Raises LabError if one is not a whole number >= 1."""
    counts = []
    for item in text.split(","):
        if not item.strip().isdecimal() or int(item) < 1:
            raise LabError(f"{name} is {text!r}; allowed: whole numbers >= 1, comma-separated")
        counts.append(int(item))
    return tuple(counts)


def parse_shares(name: str, text: str) -> tuple[float, ...]:
    """`"0.05,0.1"` as numbers. Raises LabError if one is not above 0 and up to 1."""
    shares = []
    for item in text.split(","):
        try:
            share = float(item)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            raise LabError(f"{name} is {text!r}; allowed: numbers > 0 and <= 1, comma-separated")
        shares.append(share)
    return tuple(shares)


def parse_policies(text: str) -> tuple[str, ...]:
    """`"topk,mine(a=1,b=2)"`: commas inside brackets belong to a policy."""
    found = [""]
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return tuple(part.strip() for part in found)


def parse_layers(text: str) -> tuple[int, ...] | None:
    """`"0,5,29"` as layer numbers, `"all"` as None. Raises LabError if one is not a whole number >= 0."""
    if text.strip() == "all":
        return None
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() for item in items):
        raise LabError(f"--layers is {text!r}; allowed: all, or whole numbers >= 0, comma-separated")
    return tuple(sorted({int(item) for item in items}))
