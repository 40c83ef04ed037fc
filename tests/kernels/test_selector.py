"""The selector against the float64 oracle, within the bound of `refreshes`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfi_compile.config import Config
from sfi_compile.kernels import reference, selector
from tests.kernels.refreshes import (
    INF,
    PUBLISHED,
    ROUND,
    Case,
    assert_layout,
    assert_scores,
    assert_selection,
    cases,
    chosen_of,
    score_error,
    score_of,
    select_of,
    spec_with,
)

# Against the oracle


@given(cases())
def test_scores_are_the_oracles(case: Case) -> None:
    assert_scores(case.score(), case.oracle(), score_error(case), case.cand)


@given(cases())
def test_selection_is_the_oracles_up_to_near_ties(case: Case) -> None:
    assert_selection(case)


@pytest.mark.parametrize("preset", PUBLISHED)
@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (2, 4), (4, 4)])
def test_published_settings_on_a_longer_context(preset: str, heads: int, rows: int) -> None:
    g = torch.Generator().manual_seed(heads)
    n = 1200
    spec = Config.from_options({"preset": preset, "k_head": 200}).selector()
    allowed = torch.arange(n) >= 37  # left padding
    logits = (2 * torch.randn(heads, rows, n, generator=g)).masked_fill(~allowed, -INF)
    case = Case(logits, torch.randn(heads, n, 16, generator=g), allowed, n - 1, spec)
    assert_scores(case.score(), case.oracle(), score_error(case), case.cand)
    assert_selection(case)
    found = [chosen_of(row) for row in case.select()]
    assert min(min(row) for row in found) >= 37 + spec.sink
    assert max(max(row) for row in found) <= n - 1 - spec.recent


@given(cases())
def test_what_is_chosen_is_the_top_of_the_scores(case: Case) -> None:
    scores = case.score()
    expected = [reference.best(row, case.cand, case.spec.k_head) for row in scores]
    assert [chosen_of(row) for row in case.select()] == expected
    assert torch.equal(selector.top_k(scores, case.cand, min(case.spec.k_head, len(case.cand))), case.select())


# Ties


@given(
    st.lists(st.lists(st.sampled_from([-2.0, 0.0, 0.5, -1e30]), min_size=7, max_size=7), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=7, max_size=7),
    st.integers(1, 7),
)
def test_ties_go_to_the_lower_position(values: list[list[float]], may: list[bool], k: int) -> None:
    cand = torch.tensor(may)
    scores = torch.tensor(values).masked_fill(~cand, -INF)
    indices = selector.top_k(scores, cand, k)
    assert_layout(indices, len(values), k, cand)
    assert [chosen_of(row) for row in indices] == [reference.best(row, cand, k) for row in scores]


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 7, 33, 500])
def test_equal_scores_choose_the_first_candidates(heads: int, n: int) -> None:
    spec = spec_with(norm_weight=0, position_weight=0, sink=0, recent=1, k_head=5)
    case = Case(torch.full((heads, 2, n), 1.7), torch.ones(heads, n, 4), torch.ones(n, dtype=torch.bool), n, spec)
    assert [chosen_of(row) for row in case.select()] == [list(range(min(5, n)))] * heads


def test_many_ties_at_the_cut() -> None:
    scores = torch.zeros(2, 3000)
    scores[0, 10::7] = 1.0
    cand = torch.ones(3000, dtype=torch.bool)
    cand[:3] = False
    high = list(range(10, 3000, 7))
    found = [chosen_of(row) for row in selector.top_k(scores.masked_fill(~cand, -INF), cand, 1000)]
    assert found[0] == sorted(high + [t for t in range(3, 3000) if t not in set(high)][: 1000 - len(high)])
    assert found[1] == list(range(3, 1003))


# Edges


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("visible", [True, False])
def test_without_candidates_nothing_is_chosen(heads: int, n: int, visible: bool) -> None:
    logits = torch.ones(heads, 2, n) if visible else torch.full((heads, 2, n), -INF)
    none = torch.zeros(n, dtype=torch.bool)
    keys = torch.ones(heads, n, 3)
    assert score_of(logits, keys, none, spec_with()).eq(-INF).all()
    assert torch.equal(select_of(logits, keys, none, spec_with()), torch.full((heads, min(6, n)), -1))


@pytest.mark.parametrize("preset", PUBLISHED)
@pytest.mark.parametrize("rows", [1, 4])
def test_huge_logits_stay_finite(preset: str, rows: int) -> None:
    n = 20
    values = torch.linspace(-1e4, 1e4, n).repeat(3, rows, 1)
    spec = spec_with(preset, norm_weight=0, position_weight=0, lambda_clip=0, lambda_clip_multi=0, nms_window=0)
    case = Case(values, torch.ones(3, n, 2), torch.ones(n, dtype=torch.bool), n + 3, spec)
    assert case.score()[:, case.cand].isfinite().all()
    assert [chosen_of(row) for row in case.select()] == [list(range(n - 6, n))] * 3


def test_a_dominant_key_is_chosen_and_a_large_norm_is_damped() -> None:
    n = 30
    logits = torch.zeros(1, 1, n)
    logits[0, 0, 12] = 20.0
    keys = torch.ones(1, n, 4)
    keys[0, 20] = 1e6
    keys[0, 8] = 0.0
    spec = spec_with(k_head=n, sink=0, recent=1, nms_window=0)
    case = Case(logits, keys, torch.ones(n, dtype=torch.bool), n, spec)
    scores = case.score()[0]
    assert_scores(case.score(), case.oracle(), score_error(case), case.cand)
    assert int(scores.argmax()) == 12
    plain = case.oracle()[0, [19, 21]].mean()
    assert scores[20] < plain < scores[8]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_query_that_may_attend_to_nothing_prefers_no_token(preset: str) -> None:
    logits, every = torch.randn(3, 4, 20), torch.ones(20, dtype=torch.bool)
    logits[:, 1] = 0.0
    keys, spec = torch.randn(3, 20, 2), spec_with(preset)
    expected = score_of(logits, keys, every, spec)
    logits[:, 1] = -INF
    torch.testing.assert_close(score_of(logits, keys, every, spec), expected)
    assert expected.isfinite().all()


def test_one_candidate_is_chosen_by_every_head() -> None:
    cand = torch.zeros(8, dtype=torch.bool)
    cand[5] = True
    indices = select_of(torch.arange(48.0).view(3, 2, 8), torch.ones(3, 8, 4), cand, spec_with(k_head=3))
    assert indices.tolist() == [[5, -1, -1]] * 3


@given(cases(), st.sampled_from([-100.0, -3.5, 0.25, 1000.0]))
def test_a_constant_added_to_all_logits_changes_nothing(case: Case, constant: float) -> None:
    moved = dataclasses.replace(case, logits=case.logits + constant)
    # The bound of the moved case starts from six roundings of its largest logit; the addition makes one more of them.
    assert_scores(moved.score(), case.oracle(), score_error(case) + score_error(moved), case.cand)


@pytest.mark.parametrize("junk", [math.nan, INF, 1e30])
def test_keys_that_are_no_candidates_do_not_matter(junk: float) -> None:
    n = 24
    g = torch.Generator().manual_seed(0)
    allowed = torch.arange(n) < 20
    logits = torch.randn(3, 2, n, generator=g).masked_fill(~allowed, -INF)
    case = Case(logits, torch.randn(3, n, 4, generator=g), allowed, 19, spec_with(k_head=5))
    spoiled = dataclasses.replace(case, keys=case.keys.masked_fill(~case.cand[None, :, None], junk))
    assert torch.equal(spoiled.score(), case.score())
    assert torch.equal(spoiled.select(), case.select())


# Single stages, by switching the others off


def test_evidence_alone_is_continuous_at_alpha_zero() -> None:
    g = torch.Generator().manual_seed(1)
    logits, keys, n = torch.randn(2, 4, 30, generator=g), torch.ones(2, 30, 3), 30
    cand = torch.ones(n, dtype=torch.bool)
    off: dict[str, Any] = {"lambda_clip": 0, "lambda_clip_multi": 0, "nms_alpha": 0}
    at_zero = score_of(logits, keys, cand, spec_with(alpha=0, **off))
    torch.testing.assert_close(at_zero, torch.log_softmax(logits.log_softmax(-1).mean(1), -1))
    spread = float(logits.var(dim=1, correction=0).max())
    for alpha in (0.1, 0.01, 0.001):
        near = score_of(logits, keys, cand, spec_with(alpha=alpha, **off))
        # The slope in alpha is the variance over rows; dividing by alpha enlarges rounding by 1/alpha.
        assert (near - at_zero).abs().max() <= 2 * alpha * spread + 32 * ROUND / alpha


def test_the_prior_is_clipped_by_the_number_of_rows() -> None:
    g = torch.Generator().manual_seed(2)
    logits, keys = 4 * torch.randn(1, 1, 30, generator=g), torch.ones(1, 30, 3)
    cand = torch.ones(30, dtype=torch.bool)
    log_f = torch.log_softmax(logits[0], -1)
    log_r = reference.log_prior(keys[0], cand, spec_with()).float()
    spec = spec_with(lambda_clip=0.2, lambda_clip_multi=0.1, nms_alpha=0)
    for rows, lam in ((1, 0.2), (2, 0.1)):
        expected = torch.log((1 - lam) * log_f.exp() + lam * log_r.exp())
        torch.testing.assert_close(score_of(logits.repeat(1, rows, 1), keys, cand, spec), expected)


def test_soft_nms_alone() -> None:
    logits = torch.tensor([[[0.0, 4.0, 1.0, 0.0, 9.0, 2.0, 3.0]]])
    cand = torch.tensor([True, True, True, True, False, True, True])
    spec = spec_with(lambda_clip=0, nms_window=2, nms_alpha=0.5)
    log_f = torch.log_softmax(logits[0].masked_fill(~cand, -INF), -1)
    expected = log_f - 0.5 * torch.tensor([4.0, 0.0, 3.0, 1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(score_of(logits, torch.ones(1, 7, 2), cand, spec), expected)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_exclusivity_alone(heads: int) -> None:
    logits = torch.randn(heads, 1, 9, generator=torch.Generator().manual_seed(3))
    spec = spec_with(lambda_clip=0, nms_alpha=0, exclusivity_alpha=0.85, exclusivity_temperature=2)
    found = score_of(logits, torch.ones(heads, 9, 2), torch.ones(9, dtype=torch.bool), spec)
    log_f = torch.log_softmax(logits[:, 0], -1)
    shares = 0.85 * torch.log_softmax(log_f / 2, 0) if heads > 2 else 0.0
    torch.testing.assert_close(found, log_f + shares)


# As part of a graph


def test_it_traces_whole_and_leaves_its_inputs_alone() -> None:
    g = torch.Generator().manual_seed(4)
    logits, keys, cand = torch.randn(3, 2, 40, generator=g), torch.randn(3, 40, 4, generator=g), torch.arange(40) < 30
    before = [x.clone() for x in (logits, keys, cand)]
    spec = spec_with()
    traced = torch.compile(lambda x, k, c: select_of(x, k, c, spec), backend="eager", fullgraph=True)
    assert torch.equal(traced(logits, keys, cand), select_of(logits, keys, cand, spec))
    assert all(torch.equal(x, y) for x, y in zip((logits, keys, cand), before, strict=True))


def test_keys_of_a_narrow_dtype_are_scored_in_float32() -> None:
    g = torch.Generator().manual_seed(5)
    logits, keys = torch.randn(2, 3, 25, generator=g), torch.randn(2, 25, 8, generator=g).bfloat16()
    cand = torch.ones(25, dtype=torch.bool)
    found = score_of(logits, keys, cand, spec_with())
    assert found.dtype == torch.float32
    assert torch.equal(found, score_of(logits, keys.float(), cand, spec_with()))
