"""What the last queries attend to, and what comes after it: text that repeats moves on along the context."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Reach(Policy):
    """Mean attention f of the last `queries` tokens, carried on to the `ahead` positions after it.

    Of all queries that are asked, if those are more. The score of position t is the largest of `decay^e f(t - e)` for e
    from 0 to `ahead`. Where steps to come go on with a passage that is attended to now, they find it in the memory; so
    `ahead` is about as long as a memory lasts.
    """

    name: ClassVar[str] = "reach"
    queries: int = 16
    ahead: int = 17
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.queries < 1:
            self.refuse("queries", "a whole number >= 1")
        if self.ahead < 0:
            self.refuse("ahead", "a whole number >= 0")
        if not 0.0 <= self.decay <= 1.0:
            self.refuse("decay", "a number >= 0 and <= 1")

    @property
    def window(self) -> int:
        """The queries that are asked."""
        return self.queries

    def scores(self, evidence: Evidence) -> Tensor:
        """Log of the score, but for a constant."""
        attention = evidence.log_attention
        best = attention.clone()
        loss = math.log(self.decay) if self.decay > 0 else -math.inf
        for e in range(1, min(self.ahead, attention.shape[-1] - 1) + 1):
            torch.maximum(best[:, e:], attention[:, :-e] + e * loss, out=best[:, e:])
        return best
