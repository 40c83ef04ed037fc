"""SnapKV's choice: what the last queries attend to, and its neighbours."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sfi_compile.kernels import selector
from sfi_compile.policies.base import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Attention of the last `queries` tokens, or of all that are asked, added up and pooled over `pool` neighbours.

    After Li et al., arXiv 2404.14469. SnapKV chooses once, when the prompt is read; here it chooses at every refresh,
    unless `refresh_interval` and `min_refresh_gap` are as long as the text to come. Its observation window is the
    prompt's end: of a prompt that was read before the first step, the first refresh sees the last token alone.
    """

    name: ClassVar[str] = "snapkv"
    reads_spec: ClassVar[bool] = False
    queries: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        if self.queries < 1:
            self.refuse("queries", "a whole number >= 1")
        if self.pool < 1 or self.pool % 2 == 0:
            self.refuse("pool", "an odd number >= 1")

    @property
    def window(self) -> int:
        """The observation window."""
        return self.queries

    def scores(self, evidence: Evidence) -> Tensor:
        """Log of the largest sum of probabilities within `pool` positions."""
        return selector.windowed_max(evidence.log_attention, self.pool // 2)
