"""Masks that may let through later what they block now are found, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.toys import SDPA, codes, operands, written

N = 8


def masked(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A step under the usual mask, and another one of token and position."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos) & make(torch.arange(N), pos[:, None])[None, None]
        return SDPA(q, keys, values, attn_mask=mask)

    return function


OPENING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "strided": lambda j, p: (p - j) % 3 == 0,
    "strided, or near": lambda j, p: ((p - j).remainder(3) == 0) | (j > p - 4),
    "sequences side by side": lambda j, p: j % 2 == p % 2,
    "at every other step": lambda j, p: (p % 2 == 0) | (j > p - 4),
    "by where": lambda j, p: torch.where((p - j) % 3 == 0, True, False),
    "by a distance": lambda j, p: (p - j) != 2,
    "by order of what is periodic": lambda j, p: (p - j) % 3 < 1,
}
CLOSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a window": lambda j, p: j > p - 4,
    "a window, as a distance": lambda j, p: (p - j).abs() < 4,
    "chunks": lambda j, p: j // 4 >= p // 4,
    "a prefix": lambda j, p: (j <= p) | (j < 3),
    "parity of tokens": lambda j, p: (j % 2 == 0) & (j <= p),
    "a window with sinks": lambda j, p: (j > p - 4) | (j == 0),
    "as a number": lambda j, p: (p - j).clamp(min=0) * 0.5 < 2.0,
    "from a position on": lambda j, p: (p >= 0) & (j <= p),
}


@pytest.mark.parametrize("name", OPENING)
def test_masks_that_open(name: str) -> None:
    assert codes(masked(OPENING[name]), *operands(size=N)) == (0, ["mask-opens"])


@pytest.mark.parametrize("name", CLOSING)
def test_masks_that_close(name: str) -> None:
    assert codes(masked(CLOSING[name]), *operands(size=N)) == (1, [])
