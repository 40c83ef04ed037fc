"""What `sfi bench` measures, and what its runs on a CPU and on a GPU have in common. Imports `lab.errors`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sfi_compile.lab.errors import LabError

if TYPE_CHECKING:
    import torch

DENSE_WAYS = ("dense", "flash", "kernel")
WAYS = (*DENSE_WAYS, "sfi")
"""Ways of decoding on a GPU, see `lab.bench_gpu`."""
BOUNDARY_SHARE = 20
"""One token id in so many is a boundary; tokens are drawn uniformly, so sentences last this long on average."""
FORCED_SLOW_STEPS = 8
"""Slow steps timed after the measured run, each from an invalid memory, so that their median means something."""


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to measure: every shape × batch × context."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    dtype: torch.dtype
    device: str
    options: dict[str, Any]
    seed: int = 0
    step_tokens: int = 1
    """New tokens a row in one step, 1 to 8, as when drafts are verified."""
    layers: int | None = None
    """Only so many layers of each shape, for a quick look."""
    ways: tuple[str, ...] = WAYS
    """On a GPU: what to measure."""
    profile: bool = False
    """On a GPU: say of every way where its time goes, not of sfi alone. Ways that come after are slower then."""

    def backend_options(self, vocabulary: int) -> dict[str, Any]:
        """Options of `backend="sfi"`. A fast step is to be measured also where the default would rather stay dense."""
        boundaries = tuple(range(0, vocabulary, BOUNDARY_SHARE))
        return {"boundary_token_ids": boundaries, "min_context": 0, **self.options}


def parse_ways(text: str) -> tuple[str, ...]:
    """What a GPU bench measures, from `--against`. Raises LabError for an unknown one, with those allowed."""
    names = [name.strip() for name in text.split(",")] if text != "none" else []
    for name in names:
        if name not in DENSE_WAYS:
            raise LabError(f"--against {name!r}; allowed: {', '.join(DENSE_WAYS)}, or none")
    return (*(way for way in DENSE_WAYS if way in names), "sfi")


def tell(status: Callable[[str], None], what: str, text: str) -> None:
    """Say what is going on, and with what."""
    status(f"{what}: {text}")
