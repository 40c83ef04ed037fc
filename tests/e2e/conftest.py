"""Every end-to-end test starts from a process that has compiled and counted nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import sfi_compile
from sfi_compile import diagnostics


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    gc.collect()  # graphs of the last test would still be counted
    sfi_compile.reset()
    diagnostics.counters.graphs = 0
    others = [*diagnostics.runners]  # other tests keep some for longer
    diagnostics.runners.clear()
    yield
    diagnostics.runners.update(others)
    torch._dynamo.reset()
