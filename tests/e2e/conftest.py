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
    runners, rejected = [*diagnostics.runners], dict(diagnostics.rejected)  # other tests keep some for longer
    diagnostics.runners.clear()
    diagnostics.rejected.clear()
    yield
    diagnostics.runners.update(runners)
    diagnostics.rejected.update(rejected)
    torch._dynamo.reset()
