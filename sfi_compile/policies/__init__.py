"""Policies: what a memory holds. `sfi` is the paper's selector (`kernels/selector.py`); the others are baselines.

Whatever the policy, sinks and the recent segment are kept, and `k_head` tokens for each KV head are chosen at every
refresh, in the mean over the sites; all go through the same passes and the same memory. May import kernels and
`config`.
"""

from sfi_compile.kernels.attended import Attended
from sfi_compile.policies.base import (
    Evidence,
    Policy,
    attended_of,
    budget_of,
    names,
    parse,
    register,
    scores_of,
)
from sfi_compile.policies.fresh import Fresh
from sfi_compile.policies.h2o import H2O
from sfi_compile.policies.pyramidkv import PyramidKV
from sfi_compile.policies.random import Random
from sfi_compile.policies.reach import Reach
from sfi_compile.policies.sfi import Sfi
from sfi_compile.policies.snapkv import SnapKV
from sfi_compile.policies.streaming import Streaming
from sfi_compile.policies.topk import TopK

__all__ = [
    "H2O", "Attended", "Evidence", "Fresh", "Policy", "PyramidKV", "Random", "Reach", "Sfi", "SnapKV", "Streaming",
    "TopK", "attended_of", "budget_of", "names", "parse", "register", "scores_of",
]  # fmt: skip
