"""What slow steps have attended to, and what comes after it: text that repeats moves on along the context."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.kernels.attended import Attended
from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Reach(Policy):
    """Attention of the slow steps so far, by the norm of the value, and a share of it for the positions after it.

    f(t) is the attention that a position got in the slow steps of its sequence, added up, of which `fading` is left for
    every token since, times the norm of its value. The score is `f(t) + weight * max(decay^e * f(t - e))`, e from 0 to
    `ahead`. Where steps to come go on with a passage that is attended to now, they find it in the memory; so `ahead` is
    about as long as a memory lasts.
    """

    name: ClassVar[str] = "reach"
    reads_spec: ClassVar[bool] = False
    keeps_history: ClassVar[bool] = True
    reads_values: ClassVar[bool] = True
    fading: float = 0.99
    weight: float = 0.2
    ahead: int = 17
    decay: float = 0.93

    def __post_init__(self) -> None:
        if not 0.0 <= self.fading <= 1.0:
            self.refuse("fading", "a number >= 0 and <= 1")
        if not 0.0 <= self.weight <= 1e6:
            self.refuse("weight", "a number >= 0 and <= 1e6")
        if self.ahead < 0:
            self.refuse("ahead", "a whole number >= 0")
        if not 0.0 <= self.decay <= 1.0:
            self.refuse("decay", "a number >= 0 and <= 1")

    @property
    def attended(self) -> Attended:
        """Its numbers."""
        return Attended(self.fading, 1.0, True, self.weight, self.ahead, self.decay)

    def accumulated(self, history: Tensor, attention: Tensor, tokens: int) -> Tensor:
        """The sum, which fades with every token."""
        return self.fading**tokens * history + attention

    def scores(self, evidence: Evidence) -> Tensor:
        """The score as it is. Raises ValueError without a history or values."""
        if evidence.history is None or evidence.values is None:
            raise ValueError(f"policy {self.name!r}: history or values are None; allowed: a tensor for each")
        return self.attended.scores(evidence.history, evidence.values)
