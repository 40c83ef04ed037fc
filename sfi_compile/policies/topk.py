"""The tokens with the most attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.kernels.attended import Attended
from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class TopK(Policy):
    """The largest mean probability over the evidence rows, without prior, suppression or exclusivity."""

    name: ClassVar[str] = "topk"
    reads_spec: ClassVar[bool] = False

    @property
    def attended(self) -> Attended:
        """Its numbers."""
        return Attended()

    def scores(self, evidence: Evidence) -> Tensor:
        """Log of the sum over the rows, which has the order of the mean."""
        return evidence.log_attention
