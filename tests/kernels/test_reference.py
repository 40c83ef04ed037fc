"""The oracle against hand-computed numbers, definitions, and torch's own attention in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sfi_compile.config import POSITION_BETA, Config, SelectorSpec
from sfi_compile.kernels import reference

INF = math.inf
SPEC = Config.from_options({"preset": "paper-speed"}).selector()
masks = st.lists(st.booleans(), min_size=1, max_size=40).map(torch.tensor)


def spec_with(**changes: Any) -> SelectorSpec:
    return dataclasses.replace(SPEC, **changes)


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.bool)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.double(), rtol=1e-12, atol=1e-12)


# Candidates and support


def test_candidates_by_hand() -> None:
    allowed = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    chosen = reference.candidates(allowed, position=8, sink=2, recent=3)
    assert chosen.nonzero().flatten().tolist() == [4, 5]


def test_candidates_without_sink_and_with_the_shortest_recent_segment() -> None:
    chosen = reference.candidates(ones(5), position=3, sink=0, recent=1)
    assert chosen.nonzero().flatten().tolist() == [0, 1, 2]


@given(masks, st.integers(0, 40), st.integers(0, 6), st.integers(1, 50))
def test_sink_candidates_and_recent_cover_what_is_allowed(
    allowed: torch.Tensor, position: int, sink: int, recent: int
) -> None:
    position = min(position, len(allowed) - 1)
    allowed[position + 1 :] = False
    cand = reference.candidates(allowed, position, sink, recent)
    spec = spec_with(sink=sink, recent=recent)
    every = sorted({*allowed.nonzero().flatten().tolist(), position})
    chosen = cand.nonzero().flatten().tolist()
    fixed = reference.support(allowed, position, [[]], spec)[0]
    assert not set(fixed) & set(chosen)
    assert sorted(fixed + chosen) == every
    assert reference.support(allowed, position, [chosen, []], spec) == [every, fixed]


def test_support_by_hand() -> None:
    allowed = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    spec = spec_with(sink=1, recent=3)
    assert reference.support(allowed, 9, [[5], [3, 4], [8]], spec) == [[1, 5, 8, 9], [1, 3, 4, 8, 9], [1, 8, 9]]


# Evidence


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1.0, (0.7, 0.3)),
        (0.5, (((0.5**0.5 + 0.9**0.5) / 2) ** 2, ((0.5**0.5 + 0.1**0.5) / 2) ** 2)),
        (0.0, (0.45**0.5, 0.05**0.5)),
    ],
)
def test_evidence_is_a_power_mean_of_probabilities(alpha: float, expected: tuple[float, float]) -> None:
    rows = torch.stack([logs(0.5, 0.5) + 3, logs(0.9, 0.1) - 7])
    log_f = reference.log_evidence(rows, ones(2), ones(2), alpha)
    f = torch.tensor(expected, dtype=torch.float64)
    close(log_f.exp(), f / f.sum())


def test_evidence_weighs_rows_by_what_they_give_to_the_candidates() -> None:
    # Row 0 gives 0.8 to position 0, which is allowed but no candidate; position 3 is not allowed at all.
    rows = torch.stack([logs(0.8, 0.05, 0.15, 9.0), logs(0.1, 0.6, 0.3, 9.0)])
    allowed = torch.tensor([True, True, True, False])
    cand = torch.tensor([False, True, True, False])
    log_f = reference.log_evidence(rows, allowed, cand, alpha=1.0)
    close(log_f.exp(), torch.tensor([0, 0.65 / 1.1, 0.45 / 1.1, 0], dtype=torch.float64))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 30))
def test_evidence_is_continuous_at_alpha_zero(seed: int, rows: int, n: int) -> None:
    values = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    at_zero = reference.log_evidence(values, ones(n), ones(n), 0.0)
    for alpha in (1e-3, 1e-4, 1e-5):
        near = reference.log_evidence(values, ones(n), ones(n), alpha)
        # A power mean's log has slope Var(log p) / 2 in alpha; renormalisation at most doubles the change.
        spread = torch.log_softmax(values.double(), -1).var(dim=0, correction=0).max()
        torch.testing.assert_close(near, at_zero, rtol=0, atol=float(alpha * (2 * spread + 0.1)))


def test_evidence_without_candidates_is_empty() -> None:
    none = torch.zeros(3, dtype=torch.bool)
    assert reference.log_evidence(torch.full((2, 3), -INF), none, none, 0.5).tolist() == [-INF] * 3


# Prior


def test_prior_by_hand() -> None:
    keys = torch.tensor([[9.0, 9.0], [0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    cand = torch.tensor([False, True, True, True])
    spec = spec_with(norm_weight=2.0, norm_gamma=0.5, position_weight=0.7, position_power=2.0, position_eta=0.4)
    raw = [
        -math.log(1e-6),
        -math.log(5.0) + 0.7 * (-POSITION_BETA / 9 + 0.4 * math.log(2 / 3)),
        0.7 * (-POSITION_BETA * 4 / 9 + 0.4 * math.log(1 / 3)),
    ]
    total = math.log(sum(map(math.exp, raw)))
    log_r = reference.log_prior(keys, cand, spec)
    assert log_r[0] == -INF
    close(log_r[1:], torch.tensor([x - total for x in raw], dtype=torch.float64))


def test_prior_counts_candidates_and_not_positions() -> None:
    keys = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    spread = torch.zeros(9, 3)
    cand = torch.zeros(9, dtype=torch.bool)
    where = [1, 2, 5, 8]
    spread[where], cand[where] = keys, True
    close(reference.log_prior(spread, cand, SPEC)[where], reference.log_prior(keys, ones(4), SPEC))


def test_prior_damps_large_keys_and_late_positions() -> None:
    by_norm = reference.log_prior(torch.tensor([[1.0], [2.0], [100.0]]), ones(3), spec_with(position_weight=0.0))
    by_position = reference.log_prior(torch.ones(5, 2), ones(5), SPEC)
    assert (by_norm.diff() < 0).all()
    assert (by_position.diff() < 0).all()


# Fusion


@pytest.mark.parametrize(
    ("f", "r", "clip", "lam", "s"),
    [
        ((0.75, 0.25), (0.25, 0.75), 1.0, 0.5, (0.5, 0.5)),
        ((0.75, 0.25), (0.25, 0.75), 0.35, 0.35, (0.575, 0.425)),
        ((1.0, 0.0), (0.5, 0.5), 1.0, 1.0, (0.5, 0.5)),
        ((1.0, 0.0), (0.5, 0.5), 0.0, 0.0, (1.0, 0.0)),
        ((0.6, 0.4), (0.9, 0.1), 0.35, 0.0, (0.6, 0.4)),
        ((0.3, 0.7), (0.3, 0.7), 0.35, 0.0, (0.3, 0.7)),
        # <f,f> = 0.38, <f,r> = 0.32, <r,r> = 0.46
        ((0.5, 0.3, 0.2), (0.1, 0.3, 0.6), 1.0, 0.3, (0.38, 0.3, 0.32)),
    ],
)
def test_fuse_by_hand(
    f: tuple[float, ...], r: tuple[float, ...], clip: float, lam: float, s: tuple[float, ...]
) -> None:
    if len(f) == 3:
        ff, fr, rr = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((f, f), (f, r), (r, r)))
        lam = (ff - fr) / (ff - 2 * fr + rr)
        s = tuple((1 - lam) * a + lam * b for a, b in zip(f, r, strict=True))
    log_s, found = reference.fuse(logs(*f), logs(*r), clip)
    assert found == pytest.approx(lam, abs=1e-15)
    close(log_s.exp(), torch.tensor(s, dtype=torch.float64))


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.floats(0, 1), st.floats(0.1, 20))
def test_lambda_is_clipped_and_minimises_the_square(seed: int, n: int, clip: float, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_f = torch.log_softmax(sharpness * torch.randn(n, generator=generator).double(), 0)
    log_r = torch.log_softmax(torch.randn(n, generator=generator).double(), 0)
    log_s, lam = reference.fuse(log_f, log_r, clip)
    assert 0 <= lam <= clip
    square = float((2 * log_s).exp().sum())
    for other in torch.linspace(0, clip, 21, dtype=torch.float64).tolist():
        assert square <= float((((1 - other) * log_f.exp() + other * log_r.exp()) ** 2).sum()) * (1 + 1e-12)
    assert float(log_s.exp().sum()) == pytest.approx(1, abs=1e-12)


# Refinement


def test_soft_nms_by_hand() -> None:
    log_s = torch.tensor([[-1.0, -3.0, -2.0, 50.0, -5.0, -4.0]])
    cand = torch.tensor([True, True, True, False, True, True])
    refined = reference.refine(log_s, cand, spec_with(nms_window=2, nms_alpha=0.5))
    # The neighbour at position 3 is no candidate: it neither suppresses nor gets a score.
    assert refined.tolist() == [[-1.0, -3 - 0.5 * 2, -2.0, -INF, -5 - 0.5 * 1, -4.0]]


@pytest.mark.parametrize(("window", "reach"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (100, 6)])
def test_soft_nms_reaches_half_the_window(window: int, reach: int) -> None:
    log_s = torch.full((1, 7), -3.0)
    log_s[0, 0] = 0.0
    refined = reference.refine(log_s, ones(7), spec_with(nms_window=window, nms_alpha=1.0))
    assert refined.tolist() == [[0.0] + [-6.0] * reach + [-3.0] * (6 - reach)]


def test_exclusivity_by_hand() -> None:
    log_s = torch.tensor([[-1.0], [-2.0], [-4.0]])
    refined = reference.refine(log_s, ones(1), spec_with(exclusivity_alpha=0.5, exclusivity_temperature=2.0))
    total = math.log(math.exp(-0.5) + math.exp(-1) + math.exp(-2))
    close(refined, torch.tensor([[x + 0.5 * (x / 2 - total)] for x in (-1.0, -2.0, -4.0)], dtype=torch.float64))


def test_exclusivity_reads_what_suppression_left() -> None:
    log_s = torch.log_softmax(randn(3, 9).double(), -1)
    spec = spec_with(nms_window=4, nms_alpha=0.7, exclusivity_alpha=0.0)
    suppressed = reference.refine(log_s, ones(9), spec)
    spec = dataclasses.replace(spec, exclusivity_alpha=0.6, exclusivity_temperature=3.0)
    close(reference.refine(log_s, ones(9), spec), suppressed + 0.6 * torch.log_softmax(suppressed / 3, 0))


@pytest.mark.parametrize("heads", [1, 2])
def test_exclusivity_is_off_for_two_heads_or_fewer(heads: int) -> None:
    log_s = randn(heads, 6).double()
    assert torch.equal(reference.refine(log_s, ones(6), spec_with(nms_window=0)), log_s)


# Selection


def test_ties_go_to_the_lower_position() -> None:
    scores = torch.tensor([9.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    cand = torch.tensor([False, True, True, True, True, True])
    assert [reference.best(scores, cand, k) for k in range(7)] == [
        [],
        [2],
        [2, 4],
        [1, 2, 4],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5],
    ]


def test_select_follows_the_evidence_and_leaves_out_sink_and_recent() -> None:
    n = 40
    scores = torch.zeros(1, 1, n)
    scores[0, 0, [1, 7, 20, 38]] = 12.0
    spec = spec_with(k_head=2, sink=2, recent=4)
    assert reference.select(scores, torch.ones(1, n, 2), ones(n), n - 1, spec) == [[7, 20]]
    assert reference.select(scores, torch.ones(1, n, 2), ones(n), 5, spec) == [[]]


def test_the_clip_depends_on_the_number_of_rows() -> None:
    values = torch.randn(1, 1, 20, generator=torch.Generator().manual_seed(0)) * 4
    keys = torch.ones(1, 20, 2)
    spec = spec_with(lambda_clip=0.0, lambda_clip_multi=1.0, nms_window=0)
    single = reference.score(values, keys, ones(20), ones(20), spec)
    double = reference.score(values.repeat(1, 2, 1), keys, ones(20), ones(20), spec)
    close(single, torch.log_softmax(values[0].double(), -1))
    assert not torch.allclose(single, double)
    swapped = spec_with(lambda_clip=1.0, lambda_clip_multi=0.0, nms_window=0)
    close(reference.score(values, keys, ones(20), ones(20), swapped), double)


# Scores made of attention alone


def test_a_history_by_hand() -> None:
    """Two rows over the first three positions; the fourth is not allowed, whatever its logits are."""
    history = torch.tensor([4.0, 2.0, 0.0, 8.0])
    rows = torch.stack([logs(0.5, 0.25, 0.25, 9.0) + 3, logs(0.2, 0.8, 0.0, math.nan) - 7])
    allowed = torch.tensor([True, True, True, False])
    found = reference.attended(history, rows, allowed, 0.5)
    close(found, torch.tensor([2 + 0.5 + 0.2, 1 + 0.25 + 0.8, 0.25, 4.0], dtype=torch.float64))
    close(reference.attended(history, rows, allowed, 0.0), found - history.double() / 2)


def test_a_row_that_may_attend_to_nothing_adds_nothing() -> None:
    history, nothing = torch.tensor([4.0, 2.0]), torch.full((2,), -INF)
    for rows, allowed in ((nothing[None], ones(2)), (logs(0.5, 0.5)[None], ~ones(2))):
        assert reference.attended(history, rows, allowed, 0.25).tolist() == [1.0, 0.5]
    both = torch.stack([nothing.double(), logs(0.25, 0.75)])
    close(reference.attended(history, both, ones(2), 1.0), torch.tensor([4.25, 2.75]))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 30))
def test_every_row_adds_one(seed: int, rows: int, n: int) -> None:
    values = 5 * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    found = reference.attended(torch.zeros(n), values, ones(n), 1.0)
    assert float(found.sum()) == pytest.approx(rows, abs=1e-12)


@pytest.mark.parametrize(
    ("weight", "ahead", "decay", "expected"),
    [
        # The largest of f(t), f(t-1)/2 and f(t-2)/4, by 1: 1, 8, 4, 2, 2, 1 in turn.
        (1.0, 2, 0.5, [2.0, 16.0, 4.0, 3.0, 4.0, 1.0]),
        (0.5, 2, 0.5, [1.5, 12.0, 2.0, 2.0, 3.0, 0.5]),
        (1.0, 1, 0.5, [2.0, 16.0, 4.0, 2.0, 4.0, 1.0]),
        (1.0, 0, 0.5, [2.0, 16.0, 0.0, 2.0, 4.0, 0.0]),
        (1.0, 2, 0.0, [2.0, 16.0, 0.0, 2.0, 4.0, 0.0]),
        (1.0, 2, 1.0, [2.0, 16.0, 8.0, 9.0, 4.0, 2.0]),
        (1.0, 100, 1.0, [2.0, 16.0, 8.0, 9.0, 10.0, 8.0]),
        (0.0, 2, 0.5, [1.0, 8.0, 0.0, 1.0, 2.0, 0.0]),
    ],
)
def test_carrying_on_by_hand(weight: float, ahead: int, decay: float, expected: list[float]) -> None:
    f = torch.tensor([1.0, 8.0, 0.0, 1.0, 2.0, 0.0])
    found = reference.carried(f, weight, ahead, decay)
    assert found.dtype == torch.float64
    assert found.tolist() == expected


# Attention


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from(["none", "bool", "float"]),
)
def test_attention_is_torchs(seed: int, kv_heads: int, group: int, queries: int, n: int, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(kv_heads * group, queries, 4, generator=g).double()
    k, v = torch.randn(kv_heads, n, 4, generator=g).double(), torch.randn(kv_heads, n, 5, generator=g).double()
    may = torch.rand(queries, n, generator=g) < 0.6
    may[:, 0] = True
    added = torch.randn(kv_heads * group, queries, n, generator=g).double().masked_fill(~may, -INF)
    mask = {"none": None, "bool": may, "float": added}[kind]
    theirs = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=0.7, enable_gqa=True)[0]
    close(reference.attention(q, k, v, mask, 0.7), theirs)

    everything = [list(range(n))] * kv_heads
    close(reference.attention(q, k, v, mask, 0.7, everything), theirs)

    kept = [sorted({0, *torch.randperm(n, generator=g)[: n // 2].tolist()}) for _ in range(kv_heads)]
    only = torch.zeros(kv_heads * group, queries, n, dtype=torch.bool)
    for h in range(kv_heads * group):
        only[h][:, kept[h // group]] = True
    restricted = {"none": only, "bool": only & may, "float": added.masked_fill(~only, -INF)}[kind]
    close(reference.attention(q, k, v, mask, 0.7, kept), reference.attention(q, k, v, restricted, 0.7))


def test_a_query_that_may_attend_to_nothing_gets_zeros() -> None:
    q, k, v = randn(2, 2, 3), randn(1, 4, 3), randn(1, 4, 2)
    may = torch.tensor([[False] * 4, [True] * 4])
    out = reference.attention(q, k, v, may, 1.0)
    assert out[:, 0].eq(0).all()
    assert out[:, 1].ne(0).all()
    assert reference.attention(q, k, v, None, 1.0, [[]]).eq(0).all()


def test_logits_are_ordered_by_head_of_the_group_then_query() -> None:
    q, k = randn(6, 2, 3), randn(2, 5, 3)
    may = randn(6, 2, 5) < 0
    rows = reference.logits(q, k, may, 0.25)
    assert rows.shape == (2, 6, 5)
    for head in range(6):
        for query in range(2):
            expected = (0.25 * (k[head // 3].double() @ q[head, query].double())).masked_fill(~may[head, query], -INF)
            close(rows[head // 3, (head % 3) * 2 + query], expected)


def test_softcap_comes_before_the_mask() -> None:
    q, k = 9 * randn(1, 1, 3), randn(1, 4, 3)
    added = torch.tensor([0.0, 100.0, -100.0, -INF])
    plain = reference.logits(q, k, None, 1.0)[0, 0]
    close(reference.logits(q, k, added, 1.0, softcap=2.0)[0, 0], 2 * torch.tanh(plain / 2) + added)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        reference.logits(torch.ones(3, 1, 2), torch.ones(2, 4, 2), None, 1.0)
