"""A new choice at every step: what a memory of this size could do at best, at the price of dense attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Fresh(Policy):
    """`topk`, chosen anew at every step by the step's own attention, and attended to in the same step.

    Every step is slow (`refresh_interval` is 1) and reads the whole context to choose; its output is attention over
    what it chose. It is the ceiling for policies that keep a choice for several steps.
    """

    name: ClassVar[str] = "fresh"
    reads_spec: ClassVar[bool] = False
    reads_memory: ClassVar[bool] = True

    def scores(self, evidence: Evidence) -> Tensor:
        """Log of the sum of probabilities over the rows."""
        return evidence.log_attention
