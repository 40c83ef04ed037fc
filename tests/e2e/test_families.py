"""Every sample decoder: all layers rewritten, full budget equal to dense, slow steps equal to dense."""

from __future__ import annotations

import pytest
import torch

import sfi_compile
from tests.decoders import DECODERS, Decoder
from tests.harness import FULL, SMALL, assert_close_to, compiled, decode, dense_steps, eager_lowering, graphs_of, prompt

PROMPT, CACHE = 19, 96


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.name)
def test_every_layer_is_rewritten_and_full_budget_is_dense(decoder: Decoder) -> None:
    model, _ = decoder.build()
    ids = prompt(2, PROMPT)
    dense = decode(decoder, model, model.forward, ids, 60, CACHE)
    with eager_lowering(), graphs_of() as works:
        ours = decode(decoder, model, compiled(model, strict=True, **FULL), ids, 60, CACHE)
    assert len(works) == 1
    sites = works[0].matched.sites
    assert len(sites) == decoder.sites
    assert {(s.query_heads, s.kv_heads) for s in sites} == {(decoder.query_heads, decoder.kv_heads)}
    assert works[0].matched.guard is not None
    assert works[0].matched.guard.tokens is not None
    stats = sfi_compile.stats()
    assert (stats.graphs, stats.sites, stats.rejections) == (1, decoder.sites, ())
    assert ours.kinds.count("fast") == stats.fast_steps > 50
    assert stats.retention == 1.0
    assert ours.tokens.tolist() == dense.tokens.tolist()
    assert ours.chosen.tolist() == dense.chosen.tolist()


CASES = [(decoder, dtype) for dtype in (torch.float32, torch.bfloat16) for decoder in DECODERS
         if dtype == torch.float32 or "group" not in decoder.name]  # fmt: skip


@pytest.mark.parametrize(("decoder", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v).removeprefix("torch.")))
def test_slow_steps_are_dense_whatever_came_before(decoder: Decoder, dtype: torch.dtype) -> None:
    model, _ = decoder.build()
    model = model.to(dtype)
    with eager_lowering():
        run = decode(decoder, model, compiled(model, **SMALL), prompt(2, PROMPT), 20, 48, prompt(2, 20, 1), True)
    assert run.kinds == ["fast" if step % 8 else "slow" for step in range(20)]
    slow = [step for step, kind in enumerate(run.kinds) if kind == "slow"]
    eager = dense_steps(decoder, model, run, PROMPT, dtype)[:, slow]
    exact = dense_steps(decoder, model, run, PROMPT, torch.float64)[:, slow]
    assert_close_to(exact, run.logits[:, 1:][:, slow], eager)
    fast = [step for step, kind in enumerate(run.kinds) if kind == "fast"]
    every = dense_steps(decoder, model, run, PROMPT, dtype)[:, fast]
    assert (run.logits[:, 1:][:, fast] - every).abs().max() > 1e-2, "fast steps read everything"
