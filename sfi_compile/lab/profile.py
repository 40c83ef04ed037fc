"""Where a step's time goes on a GPU: kernels counted and summed by what they do, by torch's profiler. Imports torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

_OURS = "add|carry|evidence|weigh|refine|refine_wide|blend|widen|sample|gather|threshold|write|pack|append"
_ATTENTION = "memory_attention|dense_decode|^split$|^merge$|flash|fmha|attention|softmax"
_PRODUCTS = r"gemm|gemv|splitK|cublas|cutlass|nvjet|xmma|triton_\w*_mm|tem_fused.*linear|dot_kernel"
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("selector", re.compile(f"^({_OURS})(_\\d+)?$")),
    ("attention", re.compile(_ATTENTION)),
    ("matrix products", re.compile(_PRODUCTS)),
)
"""Name of a group and what its kernels' names contain; the first that matches counts, all others are the rest."""


def kernels_of(step: Callable[[], Any], steps: int = 4) -> dict[str, Any]:
    """GPU work of one step: `{"kernels": number, "ms": by group, "largest": [[name, ms, calls], …]}`, means over steps.

    Copies and fills count as kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    ms: dict[str, float] = {name: 0.0 for name, _ in GROUPS} | {"rest": 0.0}
    for event in found:
        ms[group_of(event.key)] += event.self_device_time_total / 1e3 / steps
    largest = sorted(found, key=lambda e: -e.self_device_time_total)[:12]
    return {
        "kernels": round(sum(e.count for e in found) / steps),
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "largest": [[e.key[:80], round(e.self_device_time_total / 1e3 / steps, 4), e.count // steps] for e in largest],
    }


def group_of(kernel: str) -> str:
    """The group of a kernel, by its name."""
    return next((name for name, pattern in GROUPS if pattern.search(kernel)), "rest")
