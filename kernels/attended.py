"""Scores made of attention alone, in plain torch: what policies `reach`, `h2o` and `topk` have in common.

`attended_cuda.py` computes the same on a GPU; the oracle is in `reference.py`. Imports torch and `selector`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sfi_compile.kernels.selector import MIN_NORM


@dataclasses.dataclass(frozen=True)
class Attended:
    """A score that is made of attention alone, position by position, and carried on to later ones.

    f(t) is the attention of a slow step, added to what is left of that of the slow steps before if the policy
    `keeps_history`, times the norm of the value if `by_value`. The score is `f(t) + weight * max(decay^e * f(t - e))`,
    e from 0 to `ahead`.
    """

    fading: float = 1.0
    """What is left of the history for every token since the last slow step."""
    per_step: float = 1.0
    """What is left of it, beside that, at every slow step."""
    by_value: bool = False
    weight: float = 0.0
    ahead: int = 0
    decay: float = 1.0

    def __post_init__(self) -> None:
        shares = (self.fading, self.per_step, self.decay)
        if not all(0.0 <= x <= 1.0 for x in shares) or not 0.0 <= self.weight < torch.inf or self.ahead < 0:
            raise ValueError(f"{self}; allowed: fading, per_step and decay in 0..1, weight and ahead >= 0")

    def scores(self, history: Tensor, values: Tensor | None) -> Tensor:
        """The score in plain torch, from attention added up [H, N] and values [H, N, Dv]: [H, N]."""
        f = history
        if values is not None and self.by_value:
            # What no query may attend to has got nothing, and can hold anything.
            norm = torch.linalg.vector_norm(values.float(), dim=-1).clamp_min(MIN_NORM)
            f = torch.where(history > 0, history * norm, 0.0)
        if not self.weight:
            return f
        best = f.clone()
        for e in range(1, min(self.ahead, f.shape[-1] - 1) + 1):
            torch.maximum(best[:, e:], f[:, :-e] * self.decay**e, out=best[:, e:])
        return f + self.weight * best
