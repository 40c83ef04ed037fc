"""The Heavy-Hitter Oracle's choice: the tokens that have got the most attention so far."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.kernels.attended import Attended
from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """The largest attention, added up over the slow steps of a sequence. After Zhang et al., arXiv 2306.14048.

    H2O adds at every step, the prompt's included, what that step attends to among the tokens that it has kept, and what
    it evicts is gone. Here only slow steps add, and they attend to everything: a sum over fewer steps, of which no
    token is shut out. Fast steps add nothing, nor does a prompt that was read before the first step.
    """

    name: ClassVar[str] = "h2o"
    reads_spec: ClassVar[bool] = False
    keeps_history: ClassVar[bool] = True
    decay: float = 1.0
    """What is left of the sum at each slow step: 1 is the published sum; below, it forgets; 0 is `topk`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            self.refuse("decay", "a number >= 0 and <= 1")

    @property
    def attended(self) -> Attended:
        """Its numbers."""
        return Attended(per_step=self.decay)

    def accumulated(self, history: Tensor, attention: Tensor, tokens: int) -> Tensor:
        """The sum, of which each slow step before weighs `decay` times less."""
        return self.decay * history + attention

    def scores(self, evidence: Evidence) -> Tensor:
        """The sum as it is. Raises ValueError without one."""
        if evidence.history is None:
            raise ValueError(f"policy {self.name!r}: history is None; allowed: a tensor [KV heads, positions]")
        return evidence.history
