"""The paper's selector, by name. Its formulas are `kernels/selector.py`, its numbers options of their own."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.kernels import selector
from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Sfi(Policy):
    """Evidence, prior, fusion, soft suppression and exclusivity (arXiv 2603.12038, "Selector").

    GPUs have kernels of its own for it (`kernels/select_cuda.py`).
    """

    name: ClassVar[str] = "sfi"

    def scores(self, evidence: Evidence) -> Tensor:
        """The refined log-score."""
        return selector.score(evidence.logits, evidence.keys, evidence.log_position, evidence.spec)
