"""StreamingLLM's choice: the first tokens and the last."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """Sinks and as many recent tokens as the memory holds, whatever attention says (Xiao et al., arXiv 2309.17453).

    What `k_head` would select is the tokens before the recent segment, so that the budget is that of other policies.
    """

    name: ClassVar[str] = "streaming"
    reads_spec: ClassVar[bool] = False

    def scores(self, evidence: Evidence) -> Tensor:
        """The later, the better."""
        heads, size = evidence.keys.shape[:2]
        return torch.arange(size, device=evidence.keys.device, dtype=torch.float32).expand(heads, size)
