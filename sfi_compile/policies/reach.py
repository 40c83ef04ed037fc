"""What the last queries attend to, and what comes after it: text that repeats moves on along the context."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from sfi_compile.policies.base import Evidence, Policy, register

SMALLEST = 1e-30
"""Norms count as that much at least, so that their logarithms are finite."""


@register
@dataclasses.dataclass(frozen=True)
class Reach(Policy):
    """What the last `queries` tokens take from a position, f, carried on to the `ahead` positions after it.

    f is the largest attention of any of them times the norm of the position's value, a query counting `fading` times as
    much as the one after it; of all queries that are asked, if those are more. The score of position t is the largest
    of `decay^e f(t - e)` for e from 0 to `ahead`. Where steps to come go on with a passage that is attended to now,
    they find it in the memory; so `ahead` is about as long as a memory lasts.
    """

    name: ClassVar[str] = "reach"
    reads_values: ClassVar[bool] = True
    queries: int = 64
    ahead: int = 17
    decay: float = 0.8
    fading: float = 0.97

    def __post_init__(self) -> None:
        if self.queries < 1:
            self.refuse("queries", "a whole number >= 1")
        if self.ahead < 0:
            self.refuse("ahead", "a whole number >= 0")
        if not 0.0 <= self.decay <= 1.0:
            self.refuse("decay", "a number >= 0 and <= 1")
        if not 0.0 < self.fading <= 1.0:
            self.refuse("fading", "a number > 0 and <= 1")

    @property
    def window(self) -> int:
        """The queries that are asked."""
        return self.queries

    def scores(self, evidence: Evidence) -> Tensor:
        """Log of the score, but for a constant."""
        each = evidence.log_probabilities
        if evidence.ages is not None:
            each = each + (evidence.ages * math.log(self.fading))[:, None]
        taken = each.amax(1)
        if evidence.values is not None:
            # What no query may attend to can hold anything.
            norm = torch.linalg.vector_norm(evidence.values.float(), dim=-1).nan_to_num(0.0, 0.0, 0.0)
            taken = taken + norm.clamp_min(SMALLEST).log()
        best = taken.clone()
        loss = math.log(self.decay) if self.decay > 0 else -math.inf
        for e in range(1, min(self.ahead, taken.shape[-1] - 1) + 1):
            torch.maximum(best[:, e:], taken[:, :-e] + e * loss, out=best[:, e:])
        return best
