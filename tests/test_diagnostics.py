"""Counters: what belongs to a graph goes with it, and `reset()` keeps what is known of those that live."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

import sfi_compile
from sfi_compile import diagnostics
from tests.harness import eager_lowering


def _attend(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, cache, cache)


def test_rejections_live_as_long_as_their_graph(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    gc.collect()
    before = sfi_compile.stats().rejections
    q, cache = torch.randn(1, 2, 1, 8, requires_grad=True), torch.randn(1, 2, 16, 8)
    with eager_lowering(), caplog.at_level(logging.WARNING, "sfi_compile"):
        compiled = torch.compile(_attend, backend="sfi")
        torch.testing.assert_close(compiled(q, cache), _attend(q, cache))
        codes = {r.code for r in sfi_compile.stats().rejections if r not in before}
        assert codes == {"gradients"}
        sfi_compile.reset()
        assert {r.code for r in sfi_compile.stats().rejections if r not in before} == codes
        compiled(q, cache[:, :, :8])  # a second graph with the same reason
        assert caplog.text.count("left dense") == 1
    torch._dynamo.reset()
    del compiled
    gc.collect()
    assert sfi_compile.stats().rejections == before
    assert not [graph for graph in diagnostics.rejected if isinstance(graph, diagnostics.DenseGraph)]


def test_explain_says_when_there_is_nothing_to_rewrite() -> None:
    report = sfi_compile.explain(lambda x: x * 2, torch.ones(1))
    assert (report.sites, [r.code for r in report.rejections]) == ((), ["no-attention"])
