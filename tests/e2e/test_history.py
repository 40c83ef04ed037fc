"""Histories of attention (`reach`, `h2o`): the operator and steps against sums written down literally, in float64.

Random interleavings of user actions are in tests/property: `World` compares every history with its oracle's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
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
    """However many tokens there were between them."""
    policy = policies.H2O(decay=decay)
    g = torch.Generator().manual_seed(0)
    steps = [torch.rand(2, SIZE, generator=g) for _ in range(4)]
    history = torch.zeros(2, SIZE)
    for attention, tokens in zip(steps, (0, 3, 1, 18), strict=True):
        history = policy.accumulated(history, attention, tokens)
    candidates = (torch.arange(SIZE) >= 2) & (torch.arange(SIZE) < 10)
    logits, keys = torch.randn(2, 1, SIZE), torch.full((2, SIZE, 4), math.nan)
    evidence = Evidence(logits, keys, candidates, torch.zeros(SIZE), Config().selector(), history)
    chosen = selector.top_k(policies.scores_of(policy, evidence), candidates, 3).tolist()
    for h in range(2):
        sums = [sum(decay ** (3 - i) * float(s[h, t]) for i, s in enumerate(steps)) for t in range(SIZE)]
        assert chosen[h] == sorted(sorted(range(2, 10), key=lambda t: -sums[t])[:3])
    with pytest.raises(ValueError, match="'h2o': history is None"):
        policies.scores_of(policy, Evidence(logits, keys, candidates, torch.zeros(SIZE), Config().selector()))


@pytest.mark.parametrize("fading", [1.0, 0.9, 0.0])
def test_a_history_fades_with_every_token(fading: float) -> None:
    """What was attended to counts less by the tokens since, not by the slow steps since."""
    policy = policies.Reach(fading=fading)
    g = torch.Generator().manual_seed(0)
    steps, between = [torch.rand(2, SIZE, generator=g) for _ in range(4)], (0, 3, 1, 18)
    history = torch.zeros(2, SIZE)
    for attention, tokens in zip(steps, between, strict=True):
        history = policy.accumulated(history, attention, tokens)
    ages = [sum(between[i + 1 :]) for i in range(4)]
    wanted = sum(fading**age * attention.double() for age, attention in zip(ages, steps, strict=True))
    torch.testing.assert_close(history.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("h2o(decay=0.75)", lambda tokens: 0.75),
        ("reach(fading=0.75)", lambda tokens: 0.75**tokens),
        ("reach(fading=0.0)", lambda tokens: float(tokens == 0)),
    ],
    ids=["h2o", "reach", "reach-forgets"],
)
def test_accumulate_against_literal_loops(policy: str, left: Callable[[int], float]) -> None:
    """Rows that begin, go on, stay short, are broken, or are fast; two tokens, of which one may attend to nothing."""
    _begins, goes_on, short, empty, broken, broken_anew, ahead, fast = range(8)
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
    since = torch.tensor([0, 2, 0, 7, 3, 0, 5, 0])
    history = torch.rand(8, 2, SIZE, generator=g)
    before = history.clone()
    wanted = before.double()
    for b in range(fast):
        tokens, length = int(since[b]), int(lengths[b])
        if tokens == 0:
            wanted[b] = 0.0
        wanted[b] *= left(tokens)  # also what is hidden now, past the extent
        for h in range(2):
            for t in range(length):
                for row in logits[b, h].double() if b not in (broken, broken_anew, ahead) else ():
                    total = sum(math.exp(x) for x in row[:length].tolist())
                    wanted[b, h, t] += math.exp(float(row[t])) / total if total else 0.0
    torch.ops.sfi.accumulate(logits, slow, status, extent, since, spec_of(policy), history)
    torch.testing.assert_close(history.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(history[fast], before[fast])
    assert not history[broken_anew].any()
    for b, h in itertools.product((goes_on, empty), range(2)):
        # The same as the oracle that kernels are measured against has it.
        allowed = torch.arange(SIZE) < lengths[b]
        same = reference.attended(before[b, h], logits[b, h], allowed, left(int(since[b])))
        torch.testing.assert_close(history[b, h].double(), same, rtol=1e-5, atol=1e-6)


def test_select_shows_the_history() -> None:
    logits, keys = torch.zeros(1, 1, 1, SIZE), torch.full((1, 1, SIZE, 4), math.nan)
    history = torch.zeros(1, 1, SIZE)
    history[0, 0, [3, 8, 11]], history[0, 0, 5] = 2.0, 1.0  # 11 is past the extent
    place = torch.where(torch.arange(SIZE) < 9, 0.0, -torch.inf)[None]
    asked = (logits, keys, torch.tensor([True]), torch.tensor([0]), torch.tensor([[10, 10, 0]]), place, spec_of("h2o"))
    assert torch.ops.sfi.select(*asked, history=history).tolist() == [[[3, 5, 8]]]


def test_a_query_that_may_attend_to_nothing_adds_nothing() -> None:
    """Padding beside a token of the same step."""
    q, k = torch.randn(1, 4, 2, 4), torch.randn(1, 2, SIZE, 4)
    mask = torch.zeros(1, 1, 2, SIZE, dtype=torch.bool)
    mask[..., 1, 3:8] = True
    slow, status, context = torch.tensor([True]), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    extent, history = torch.tensor([[5, 8, 0]]), torch.zeros(1, 2, SIZE)
    out, logits = torch.ops.sfi.dense_attention(q, k, k, mask, slow, extent, 0.5, status, context)
    torch.ops.sfi.accumulate(logits, slow, status, extent, torch.tensor([0]), spec_of("reach"), history)
    assert not out[:, :, 0].any()
    assert not history[..., :3].any()
    torch.testing.assert_close(history.sum(-1), torch.full((1, 2), 2.0))  # of two query heads each


def runner_of() -> DecodeRunner:
    [runner] = diagnostics.runners
    return runner


POLICIES = {"h2o": ("h2o", 1.0), "reach": ("reach(fading=0.9)", 0.9)}
"""As the options say it; and what is left of a history for every token."""


def histories(kept: str, rows: list[int], slow: list[list[int]]) -> list[Tensor]:
    """Of these rows of two, after 14 steps: of every layer, [rows, Hkv, N].

    Args:
        kept: of `POLICIES`.
        rows: which.
        slow: steps in which each of them must be slow.
    """
    policy, fading = POLICIES[kept]
    llama = BY_NAME["llama"]
    model, _ = llama.build()
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    ids, fed = prompt(2, 20), prompt(2, 14, 1)
    fed[fed == 7] = 8
    fed[1, 5] = 7
    forward = compiled(model, **SMALL, policy=policy, boundary_token_ids=(7,))
    run = decode(llama, model, forward, ids[rows], 14, 40, fed[rows])
    assert [i for i, kind in enumerate(run.kinds) if kind == "slow"] == sorted({i for steps in slow for i in steps})
    runner = runner_of()
    found = [runner.state[f"sfi_history_{i}"].clone() for i in range(llama.sites)]
    for history in found:
        # A slow step of a row adds one for each query head of the group.
        sums = [group * sum(fading ** (steps[-1] - i) for i in steps) for steps in slow]
        torch.testing.assert_close(history.sum(-1), torch.tensor(sums)[:, None].expand(history.shape[:2]))
        assert not history[..., 34:].any(), "not written yet"
    decode(llama, model, forward, prompt(len(rows), 22, 5), 1, 40, fed[rows])
    for i in range(llama.sites):
        history = runner.state[f"sfi_history_{i}"]
        torch.testing.assert_close(history.sum(-1), torch.full(history.shape[:2], float(group)))
    return found


@pytest.mark.parametrize("kept", POLICIES)
def test_a_row_in_a_batch_has_the_history_that_it_has_alone(kept: str) -> None:
    """Slow at steps of its own, by a boundary token; another prompt begins anew."""
    with eager_lowering():
        together = histories(kept, [0, 1], [[0, 8], [0, 5, 13]])
    with eager_lowering():
        first = histories(kept, [0], [[0, 8]])
    with eager_lowering():
        second = histories(kept, [1], [[0, 5, 13]])
    for both, *alone in zip(together, first, second, strict=True):
        torch.testing.assert_close(both, torch.cat(alone), rtol=1e-4, atol=1e-6)


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return toys.SDPA(q, keys, values, attn_mask=toys.written(k, v, keys, values, pos), enable_gqa=True)


@pytest.mark.parametrize(
    ("policy", "left"), [("h2o(decay=0.5)", 0.5), ("reach(fading=0.8,ahead=2)", 0.8**3)], ids=["h2o", "reach"]
)
def test_histories_through_inductor_over_caches_full_of_nan(policy: str, left: float) -> None:
    """Slow every third step; what nobody wrote is NaN. A second text in the same cache begins anew."""
    torch._dynamo.reset()
    options = {"policy": policy, "min_context": 0, "sink": 1, "recent": 2, "k_head": 3, "refresh_interval": 3}
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
                    wanted = left * wanted + logits.softmax(-1).sum(1)
                history = runner_of().state["sfi_history_0"][0]  # of a whole number of vectors
                torch.testing.assert_close(history[:, :SIZE].double(), wanted, rtol=1e-5, atol=1e-6)
                assert not history[:, SIZE:].any()
        held = runner_of().state["sfi_held_0"][0]
        parsed = policies.parse(policy)
        for h in range(2):
            scores = wanted[h]
            if isinstance(parsed, policies.Reach):
                norms = values[0, h].nan_to_num().double().norm(dim=-1)
                scores = reference.carried(scores * norms, parsed.weight, parsed.ahead, parsed.decay)
            best = reference.best(scores, reference.candidates(torch.arange(SIZE) <= 6, 6, 1, 2), 3)
            assert sorted(t for t in held[h].tolist() if t >= 0) == sorted({0, *best, 5, 6, 7, 8})
