"""Where a long run's progress goes. Imports nothing of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


def ignore(value: object) -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Spinners and bars; the defaults are silent."""

    busy: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()
    """A spinner with that text while the context lasts."""
    bar: Callable[[int, str], AbstractContextManager[Callable[[int], None]]] = lambda total, text: nullcontext(ignore)
    """A bar over `total` tokens with that text; the context gives the function that advances it."""
