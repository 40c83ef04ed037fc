"""Histories of attention (policy `h2o`): the operator and steps against sums written down literally, in float64.

Random interleavings of user actions are in tests/property: `World` compares every history with its oracle's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sfi_compile
from sfi_compile import diagnostics, policies
from sfi_compile.config import Config
from sfi_compile.kernels import reference, selector
from sfi_compile.ops import RowStatus
from sfi_compile.policies import Evidence
from sfi_compile.runtime import DecodeRunner
from tests.decoders import BY_NAME
from tests.harness import SMALL, compiled, decode, eager_lowering, prompt
from tests.passes import toys

SIZE = 12


def spec_of(policy: str) -> str:
    return Config.from_options({"policy": policy, "k_head": 3, "sink": 0}).selector().to_text()


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_the_most_attention_over_all_slow_steps_is_chosen(decay: float) -> None:
    policy = policies.H2O(decay=decay)
    g = torch.Generator().manual_seed(0)
    steps = [torch.rand(2, SIZE, generator=g) for _ in range(4)]
    history = torch.zeros(2, SIZE)
    for attention in steps:
        history = policy.accumulated(history, attention)
    candidates = (torch.arange(SIZE) >= 2) & (torch.arange(SIZE) < 10)
    logits, keys = torch.randn(2, 1, SIZE), torch.full((2, SIZE, 4), math.nan)
    evidence = Evidence(logits, keys, candidates, torch.zeros(SIZE), Config().selector(), history)
    chosen = selector.top_k(policies.scores_of(policy, evidence), candidates, 3).tolist()
    for h in range(2):
        sums = [sum(decay ** (3 - i) * float(s[h, t]) for i, s in enumerate(steps)) for t in range(SIZE)]
        assert chosen[h] == sorted(sorted(range(2, 10), key=lambda t: -sums[t])[:3])
    with pytest.raises(ValueError, match="'h2o': history is None"):
        policies.scores_of(policy, Evidence(logits, keys, candidates, torch.zeros(SIZE), Config().selector()))


def test_accumulate_against_literal_loops() -> None:
    """Rows that begin, go on, stay short, are broken, or are fast; two tokens, of which one may attend to nothing."""
    begins, goes_on, short, empty, broken, broken_anew, ahead, fast = range(8)
    g = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(8, 2, 4, SIZE, generator=g)
    lengths = torch.tensor([8, 7, 5, 1, 8, 8, 9, 8])
    for b, length in enumerate(lengths.tolist()):
        logits[b, :, :, length:] = -torch.inf if b % 2 else math.nan  # past the extent: nobody's
        logits[b, :, 1, 2] = -torch.inf
    logits[goes_on, 1, 3] = -torch.inf
    logits[empty] = -torch.inf
    logits[broken] = math.nan
    slow = torch.tensor([True] * 7 + [False])
    status = torch.zeros(8, dtype=torch.int64)
    status[[short, empty]], status[[broken, broken_anew]] = int(RowStatus.SHORT), int(RowStatus.NOT_FINITE)
    status[ahead] = int(RowStatus.AHEAD)
    extent = torch.stack([lengths, lengths, torch.zeros_like(lengths)], 1)
    started = torch.tensor([6, 2, 6, 2, 2, 6, 2, 6])
    history = torch.rand(8, 2, SIZE, generator=g)
    wanted = history.double()
    for b in (begins, goes_on, short, empty, broken_anew):
        if b in (begins, short, broken_anew):
            wanted[b] = 0.0
        for h in range(2):
            for t in range(int(lengths[b]) if b != broken_anew else 0):
                wanted[b, h, t] *= 0.75
                for row in logits[b, h].double():
                    total = sum(math.exp(x) for x in row[: lengths[b]].tolist())
                    wanted[b, h, t] += math.exp(float(row[t])) / total if total else 0.0
    before = history.clone()
    given = (logits, slow, status, extent, torch.tensor([6, 7]), started)
    torch.ops.sfi.accumulate(*given, spec_of("h2o(decay=0.75)"), history)
    torch.testing.assert_close(history.double(), wanted, rtol=1e-5, atol=1e-6)
    for b in (broken, ahead, fast):
        assert torch.equal(history[b], before[b])


def test_select_shows_the_history() -> None:
    logits, keys = torch.zeros(1, 1, 1, SIZE), torch.full((1, 1, SIZE, 4), math.nan)
    history = torch.zeros(1, 1, SIZE)
    history[0, 0, [3, 8, 11]], history[0, 0, 5] = 2.0, 1.0  # 11 is past the extent
    place = torch.where(torch.arange(SIZE) < 9, 0.0, -torch.inf)[None]
    asked = (logits, keys, torch.tensor([True]), torch.tensor([0]), torch.tensor([[10, 10, 0]]), place, spec_of("h2o"))
    assert torch.ops.sfi.select(*asked, history=history).tolist() == [[[3, 5, 8]]]


def runner_of() -> DecodeRunner:
    [runner] = diagnostics.runners
    return runner


def histories(rows: list[int], slow: list[int], steps: list[int]) -> list[Tensor]:
    """Of these rows of two, after 14 steps: of every layer, [rows, Hkv, N].

    Args:
        rows: which.
        slow: steps that must be slow.
        steps: how many of them are, of each row.
    """
    llama = BY_NAME["llama"]
    model, _ = llama.build()
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    ids, fed = prompt(2, 20), prompt(2, 14, 1)
    fed[fed == 7] = 8
    fed[1, 5] = 7
    forward = compiled(model, **SMALL, policy="h2o", boundary_token_ids=(7,))
    run = decode(llama, model, forward, ids[rows], 14, 40, fed[rows])
    assert [i for i, kind in enumerate(run.kinds) if kind == "slow"] == slow
    runner = runner_of()
    found = [runner.state[f"sfi_history_{i}"].clone() for i in range(llama.sites)]
    for history in found:
        # A slow step of a row adds one for each query head of the group.
        total = group * torch.tensor(steps, dtype=torch.float32)[:, None].expand(history.shape[:2])
        torch.testing.assert_close(history.sum(-1), total)
        assert not history[..., 34:].any(), "not written yet"
    decode(llama, model, forward, prompt(len(rows), 22, 5), 1, 40, fed[rows])
    for i in range(llama.sites):
        history = runner.state[f"sfi_history_{i}"]
        torch.testing.assert_close(history.sum(-1), torch.full(history.shape[:2], float(group)))
    return found


def test_a_row_in_a_batch_has_the_history_that_it_has_alone() -> None:
    """Slow at steps of its own, by a boundary token; another prompt begins anew."""
    with eager_lowering():
        together = histories([0, 1], [0, 5, 8, 13], [2, 3])
    with eager_lowering():
        first = histories([0], [0, 8], [2])
    with eager_lowering():
        second = histories([1], [0, 5, 13], [3])
    for both, *alone in zip(together, first, second, strict=True):
        torch.testing.assert_close(both, torch.cat(alone), rtol=1e-4, atol=1e-6)


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return toys.SDPA(q, keys, values, attn_mask=toys.written(k, v, keys, values, pos), enable_gqa=True)


def test_histories_through_inductor_over_caches_full_of_nan() -> None:
    """Slow every third step; what nobody wrote is NaN. A second text in the same cache begins anew."""
    torch._dynamo.reset()
    options = {"policy": "h2o(decay=0.5)", "min_context": 0, "sink": 1, "recent": 2, "k_head": 3, "refresh_interval": 3}
    forward = torch.compile(step, backend="sfi", options=options)
    keys, values = torch.full((1, 2, SIZE, 4), math.nan), torch.full((1, 2, SIZE, 4), math.nan)
    history: Any = None
    with torch.no_grad():
        for text in range(2):
            wanted = torch.zeros(2, SIZE, dtype=torch.float64)
            for at in range(9):
                seed = 100 * text + 10 * at
                q, k, v = (toys.tensor(1, h, 1, 4, seed=seed + i) for i, h in enumerate((4, 2, 2)))
                before = sfi_compile.stats().slow_steps
                out = forward(q, k, v, keys, values, torch.tensor([at]))
                assert out.isfinite().all()
                slow = sfi_compile.stats().slow_steps > before
                assert slow == (at % 3 == 0)
                if slow:
                    mask = (torch.arange(SIZE) <= at)[None, None]
                    logits = reference.logits(q[0], keys[0].nan_to_num(), mask, 0.5)
                    wanted = 0.5 * wanted + logits.softmax(-1).sum(1)
                history = runner_of().state["sfi_history_0"][0]
                torch.testing.assert_close(history.double(), wanted, rtol=1e-5, atol=1e-6)
        held = runner_of().state["sfi_held_0"][0]
        for h in range(2):
            best = reference.best(wanted[h], reference.candidates(torch.arange(SIZE) <= 6, 6, 1, 2), 3)
            assert sorted(t for t in held[h].tolist() if t >= 0) == sorted({0, *best, 5, 6, 7, 8})
