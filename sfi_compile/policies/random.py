"""A choice that knows nothing: the floor that any policy must beat."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Tokens drawn evenly, for each head others. The same seed draws the same, whatever the text."""

    name: ClassVar[str] = "random"
    reads_spec: ClassVar[bool] = False
    seed: int = 0

    def scores(self, evidence: Evidence) -> Tensor:
        """Drawn on the host, for every position from the first, so that a longer context keeps what it has."""
        heads, size = evidence.keys.shape[:2]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(size, heads, generator=generator).T.to(evidence.keys.device)
