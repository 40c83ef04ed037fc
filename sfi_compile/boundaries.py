"""Which tokens end a sentence or clause: the text trigger of slow steps.

This room imports the standard library alone. Tokenizers come in by duck typing, so that importing it never pulls in
`transformers` or `tokenizers`; the result is what the option `boundary_token_ids` takes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

TERMINATORS = frozenset(
    ".!?…;‼⁇⁈⁉"  # Latin
    "。！？；．｡︒"  # CJK, full and half width
    "؟؛۔।॥።։။។\u037e"  # Arabic, Devanagari, Ethiopic, Armenian, Myanmar, Khmer; the Greek question mark
)
"""Characters that end a sentence or clause; runs of them (`...`, `……`, `?!`) end with one and count as one."""

_NEWLINES = frozenset("\n\u2028\u2029")
_STOPS = frozenset(".．")
_CLOSING_CATEGORIES = frozenset({"Pe", "Pf", "Pi"})  # Pi too: German and others close with “ and «


def sentence_boundaries(tokenizer: Any) -> tuple[int, ...]:
    """The token ids, ascending, whose text ends a sentence, a clause or a line.

    Pass the result as `options={"boundary_token_ids": ...}`: a row that is fed one of these tokens becomes slow and
    refreshes its memory (arXiv 2603.12038, sentence-boundary trigger; docs/design.md, "Steps").
    `is_boundary_text` states the rule; it looks at one token at a time, so what depends on the neighbours is decided
    once for all: `.` counts although it may be a decimal point, `Mr.` and `);` count. A wrong boundary costs one
    early refresh, a missed one is caught by `refresh_interval`. Special tokens are never boundaries, and neither is
    a token that holds only part of a character's bytes.

    Args:
        tokenizer: a `transformers` tokenizer, a `tokenizers.Tokenizer`, or anything whose `get_vocab()` maps token
            (str, or bytes) to id. Byte-level BPE, SentencePiece (with byte fallback) and WordPiece are understood.

    Raises:
        TypeError: there is no `get_vocab()`, or it returns no mapping.
    """
    return tuple(boundary_strings(tokenizer))


def boundary_strings(tokenizer: Any) -> dict[int, str]:
    """The boundary tokens with their text (a leading space kept), by ascending id: `sentence_boundaries` to read.

    Raises:
        TypeError: as `sentence_boundaries`.
    """
    texts = _token_texts(tokenizer)
    return {token_id: texts[token_id] for token_id in sorted(texts) if is_boundary_text(texts[token_id])}


def is_boundary_text(text: str) -> bool:
    """Whether a token with this text ends a sentence, a clause or a line.

    True if the trailing white space holds a newline (`\\n\\n`, `.\\n`, and also `\\n` with indentation after it), or if
    the text reads `... terminator [closing quotes, brackets, spaces]*`, as `."`, `!”`, `。」`, `.)` or `);` do. False
    for `.com` and `.5`, for closers alone, and for one full stop right after a digit (`3.`): that is a decimal
    point or a list number at least as often as an end. `3!`, `3;` and `3...` are ends.
    """
    body = text.rstrip()
    if not _NEWLINES.isdisjoint(text[len(body) :]):
        return True
    while body and _is_closer(body[-1]):
        body = body[:-1]
    if not body or body[-1] not in TERMINATORS:
        return False
    return not (body[-1] in _STOPS and body[-2:-1].isdecimal())


def _is_closer(char: str) -> bool:
    return char.isspace() or char in "\"'＂＇" or unicodedata.category(char) in _CLOSING_CATEGORIES


def _token_texts(tokenizer: Any) -> dict[int, str]:
    """Text of every ordinary token, by id. Read from the vocabulary: decoding one id alone would drop its space."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    vocab = get_vocab() if callable(get_vocab) and not isinstance(tokenizer, type) else None
    if not isinstance(vocab, Mapping):
        what = tokenizer.__name__ if isinstance(tokenizer, type) else f"an object of type {type(tokenizer).__name__}"
        raise TypeError(
            f"sentence_boundaries: tokenizer is {what}, which has no get_vocab() that returns a mapping; allowed: a "
            "transformers tokenizer (of a processor, its .tokenizer), a tokenizers.Tokenizer, or an object whose "
            "get_vocab() maps token to id"
        )
    added = _added_tokens(tokenizer)
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", None) or ()}
    special |= {token_id for token_id, token in added.items() if getattr(token, "special", False)}
    ordinary = {token: token_id for token, token_id in vocab.items() if token_id not in special}
    style = _style(ordinary)
    # Added tokens are matched before the model runs, so their text is written as it stands in every style.
    return {i: _text(token, "as it stands" if i in added else style) for token, i in ordinary.items()}


def _added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """Id → AddedToken, from either library's spelling; empty for a tokenizer that knows no such thing."""
    method = getattr(tokenizer, "get_added_tokens_decoder", None)
    added = method() if callable(method) else getattr(tokenizer, "added_tokens_decoder", None)
    return added if isinstance(added, Mapping) else {}


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest is shifted to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()


def _style(vocab: Mapping[Any, int]) -> str:
    """How the vocabulary writes text: "byte-level", "sentencepiece", "wordpiece" or "plain", by its word marks.

    A vote, because single tokens mislead: `Ġ` is a Maltese letter, and `##` a heading. No byte-level pre-tokenizer
    leaves two hashes and a letter in one token, hence the letter or digit after `##`.
    """
    tokens = [token for token in vocab if isinstance(token, str)]
    votes = {
        "plain": 0,
        "byte-level": sum(token.startswith(("Ġ", "Ċ")) for token in tokens),
        "sentencepiece": sum(token.startswith(("▁", "<0x")) for token in tokens),
        "wordpiece": sum(token[:2] == "##" and token[2:3].isalnum() for token in tokens),
    }
    return max(votes, key=votes.__getitem__)


def _text(token: str | bytes, style: str) -> str:
    if isinstance(token, bytes):
        return token.decode("utf-8", "replace")
    if style == "as it stands":
        return token
    token = token.removesuffix("</w>") or token
    if style == "byte-level" and all(char in _BYTE_OF for char in token):
        # A character cut at either end becomes U+FFFD, which is no terminator; a whole one beside it still counts.
        return bytes(_BYTE_OF[char] for char in token).decode("utf-8", "replace")
    if style == "sentencepiece":
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5]).decode("utf-8", "replace")
        return token.replace("▁", " ")
    return token[2:] if style == "wordpiece" and token[:2] == "##" and token[2:] else token
