"""PyramidKV's choice: SnapKV's, with much for the first layers and little for the last."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar

from sfi_compile.policies.base import register
from sfi_compile.policies.snapkv import SnapKV


@register
@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's score, under budgets that fall evenly from site to site. After Cai et al., arXiv 2406.02069.

    The last site gets `k_head / beta`, the first twice `k_head` less that, so that all of them get as much as under
    another policy, if their caches are of one length. Sites left dense do not count. Sinks, recent tokens and the
    tokens since a refresh come on top.
    """

    name: ClassVar[str] = "pyramidkv"
    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= self.beta < math.inf:
            self.refuse("beta", "a number >= 1")

    def budget(self, site: int, sites: int, k_head: int, context: int) -> int:
        """Sums to `sites * k_head`, or to all there is; at least 1, at most the context, and none above one before."""
        mean = min(k_head, context)
        # As in the paper's code, what the first cannot take is left to the last.
        last = max(mean / Fraction(self.beta), Fraction(1), Fraction(2 * mean - context))
        fall = 2 * (mean - last) / max(sites - 1, 1)
        exact = [2 * mean - last - i * fall for i in range(sites)] if sites > 1 else [Fraction(mean)]
        # Rounded down, but for as many of the first as make up the sum.
        short = sites * mean - sum(map(math.floor, exact))
        rounded_up = [i for i, share in enumerate(exact) if share.denominator > 1][:short]
        return math.floor(exact[site]) + (site in rounded_up)
