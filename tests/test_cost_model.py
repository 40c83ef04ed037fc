"""The cost model against counts made by hand, and its break-even against the two sides that it compares."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from sfi_compile.config import Config
from sfi_compile.cost_model import FORMULAS, CostModel, M, N, SiteShape, largest_slow_share

SMALL = SiteShape(
    batch=2,
    query_heads=4,
    kv_heads=2,
    key_dim=3,
    value_dim=5,
    query_len=1,
    context=100,
    itemsize=2,
    repeats_heads=False,
    masked=False,
)
LARGE = SiteShape(4, 32, 8, 128, 128, 1, 131072, 2, repeats_heads=False, masked=True)
TEN_SLOTS = Config(sink=1, k_head=3, recent=2, refresh_interval=4)


def dense_and_mean(model: CostModel, context: int) -> tuple[Any, Any]:
    return model.dense_bytes.subs(N, context), model.mean_bytes.subs(N, context)


def test_bytes_of_a_small_site_counted_by_hand() -> None:
    model = CostModel.of([SMALL], TEN_SLOTS)
    token = 2 * 2 * (3 + 5) * 2  # rows, KV heads, K and V, two bytes
    query = 2 * 4 * (3 + 5) * 2  # the query read, the output written
    memory = 10 * (token + 2 * 2 * 8)  # ten slots of K and V, each with an index
    logits, norms, scores = 3 * 2 * 4 * 4, 2 * 2 * 3 * 2, 16 * 2 * 2 * 4
    assert model.dense_bytes == token * N + query
    assert model.slow_bytes == (token + logits + norms + scores) * N + 10 * token + memory + query
    assert model.fast_bytes == memory + token + query


def test_flops_of_a_small_site_counted_by_hand() -> None:
    model = CostModel.of([SMALL], TEN_SLOTS)
    pair = 2 * (2 * 4) * (3 + 5)  # a multiply and an add, for rows x query heads, over K and V
    assert model.dense_flops == pair * N
    assert model.slow_flops == (pair + 4 * 2 * 4 + 2 * 2 * 2 * 3 + 32 * 2 * 2) * N
    assert model.fast_flops == pair * 10
    assert sympy.expand(model.mean_flops - model.slow_flops / 4 - model.fast_flops * Fraction(3, 4)) == 0


def test_a_repeated_copy_is_written_and_read_again_by_dense_attention_only() -> None:
    plain = CostModel.of([SMALL], TEN_SLOTS)
    repeated = CostModel.of([dataclasses.replace(SMALL, repeats_heads=True)], TEN_SLOTS)
    assert sympy.expand(repeated.dense_bytes - plain.dense_bytes) == 2 * (2 * 4 * (3 + 5) * 2) * N
    assert repeated.slow_bytes == plain.slow_bytes
    assert repeated.fast_bytes == plain.fast_bytes


def test_a_mask_costs_one_byte_per_query_and_position_in_dense_and_slow_steps() -> None:
    plain = CostModel.of([SMALL], TEN_SLOTS)
    masked = CostModel.of([dataclasses.replace(SMALL, masked=True)], TEN_SLOTS)
    assert sympy.expand(masked.dense_bytes - plain.dense_bytes) == 2 * N
    assert sympy.expand(masked.slow_bytes - plain.slow_bytes) == 2 * N
    assert masked.fast_bytes == plain.fast_bytes


def test_a_fast_step_does_not_depend_on_the_context() -> None:
    for name in ("fast_bytes", "fast_flops"):
        assert not FORMULAS[name].has(N)
        assert FORMULAS[name].has(M)


def test_sites_add_up() -> None:
    both = CostModel.of([SMALL, LARGE, SMALL], TEN_SLOTS)
    small, large = CostModel.of([SMALL], TEN_SLOTS), CostModel.of([LARGE], TEN_SLOTS)
    for name in FORMULAS:
        assert sympy.expand(getattr(both, name) - 2 * getattr(small, name) - getattr(large, name)) == 0, name


def test_identical_sites_are_filled_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []

    class Counted:
        def xreplace(self, numbers: dict[Any, Any]) -> Any:
            filled.append(numbers)
            return N

    monkeypatch.setitem(FORMULAS, "dense_bytes", Counted())
    assert CostModel.of([dataclasses.replace(LARGE) for _ in range(36)], TEN_SLOTS).dense_bytes == 36 * N
    assert len(filled) == 1


def test_break_even_of_a_small_site_solved_by_hand() -> None:
    model = CostModel.of([SMALL], TEN_SLOTS, slow_share=0.1)
    # dense 64 N + 128; slow 440 N + 640 + 960 + 128; fast 960 + 64 + 128; mean at a tenth 44 N + 172.8 + 1036.8.
    assert model.slow_share == Fraction(1, 10)
    assert model.break_even == 55  # 20 N > 1081.6, and 1081.6 / 20 = 54.08


def test_equal_cost_is_not_a_win() -> None:
    # Only fast steps: dense 64 N + 128 meets 960 + 64 + 128 exactly at N = 16.
    model = CostModel.of([SMALL], TEN_SLOTS, slow_share=0)
    assert dense_and_mean(model, 16) == (1152, 1152)
    assert model.break_even == 17


def test_sfi_never_wins_when_every_step_refreshes() -> None:
    model = CostModel.of([LARGE], Config(refresh_interval=1))
    assert model.slow_share == 1
    assert model.break_even is None
    assert model.threshold is None
    assert "break-even: never" in model.describe()
    assert model.as_dict()["threshold"] is None


def test_sfi_always_wins_when_dense_attention_costs_more_from_the_first_token() -> None:
    model = CostModel.of([LARGE], Config())
    always = dataclasses.replace(model, dense_bytes=model.mean_bytes + N + 1)
    assert always.break_even == 0
    assert always.threshold == Config().memory_slots
    assert dataclasses.replace(model, dense_bytes=model.mean_bytes + 1).break_even == 0
    assert dataclasses.replace(model, dense_bytes=model.mean_bytes).break_even is None
    assert dataclasses.replace(model, dense_bytes=model.mean_bytes + N).break_even == 1


def test_a_wider_memory_moves_the_break_even_up() -> None:
    found = [CostModel.of([LARGE], Config(k_head=k_head)).break_even for k_head in (1, 64, 1536, 4096, 65536)]
    known = [context for context in found if context is not None]
    assert len(known) == len(found)
    assert known == sorted(set(known))


def test_more_refreshes_move_the_break_even_up() -> None:
    found = [CostModel.of([LARGE], Config(), slow_share=share).break_even for share in (0, 0.01, 0.1, 0.3)]
    known = [context for context in found if context is not None]
    assert len(known) == len(found)
    assert known == sorted(set(known))


def test_repeated_heads_win_earlier_and_the_memory_then_sets_the_threshold() -> None:
    plain = CostModel.of([LARGE], Config())
    repeated = CostModel.of([dataclasses.replace(LARGE, repeats_heads=True)], Config())
    assert plain.break_even is not None
    assert repeated.break_even is not None
    assert repeated.break_even < Config().memory_slots < plain.break_even
    assert repeated.threshold == Config().memory_slots
    assert plain.threshold == plain.break_even


def test_a_huge_budget_never_puts_the_threshold_below_the_memory() -> None:
    config = Config(k_head=1_000_000)
    for repeats in (False, True):
        threshold = CostModel.of([dataclasses.replace(LARGE, repeats_heads=repeats)], config).threshold
        assert threshold is not None
        assert threshold >= config.memory_slots


@pytest.mark.parametrize("min_context", [0, 7, 10**9])
@pytest.mark.parametrize("refresh_interval", [1, 32])
def test_min_context_overrides_the_model(min_context: int, refresh_interval: int) -> None:
    model = CostModel.of([LARGE], Config(min_context=min_context, refresh_interval=refresh_interval))
    assert model.threshold == min_context
    assert f"threshold (min_context): {min_context} tokens" in model.describe()


@pytest.mark.parametrize(
    ("options", "period"),
    [
        ({}, 18),
        ({"boundary_token_ids": (13,)}, 18),
        ({"boundary_token_ids": (13,), "refresh_interval": 8}, 8),
        ({"preset": "paper-speed"}, 32),
        ({"preset": "paper-speed", "boundary_token_ids": (13,)}, 16),
        ({"preset": "paper-speed", "boundary_token_ids": (13,), "refresh_interval": 8}, 8),
        ({"boundary_token_ids": (13,), "min_refresh_gap": 0}, 3),
        ({"boundary_token_ids": (13,), "min_refresh_gap": 0, "sentence_cooldown": 0}, 1),
    ],
)
def test_share_of_slow_steps_is_the_worst_that_the_triggers_allow(options: dict[str, Any], period: int) -> None:
    config = Config.from_options(options)
    # Every token fed is a boundary: count the steps between two refreshes as the triggers are defined.
    gap = 1
    while not (
        gap >= config.refresh_interval
        or (config.boundary_token_ids and gap >= config.min_refresh_gap and gap > config.sentence_cooldown)
    ):
        gap += 1
    assert gap == period
    assert largest_slow_share(config) == Fraction(1, period)


def test_a_shared_dynamic_batch_cancels_out_of_the_break_even() -> None:
    rows = sympy.Symbol("s0", integer=True, positive=True)
    fixed = CostModel.of([LARGE, dataclasses.replace(LARGE, key_dim=64)], Config())
    for batch in (rows, 2 * rows, rows - 1):
        shapes = [dataclasses.replace(shape, batch=batch) for shape in fixed.shapes]
        dynamic = CostModel.of(shapes, Config())
        assert dynamic.dense_bytes.free_symbols == {N, rows}
        assert dynamic.break_even == fixed.break_even
        assert dynamic.threshold == fixed.threshold


def test_other_dynamic_sizes_must_be_substituted() -> None:
    queries = sympy.Symbol("s1", integer=True, positive=True)
    unrelated = sympy.Symbol("s2", integer=True, positive=True)
    dynamic = CostModel.of([dataclasses.replace(LARGE, query_len=queries, context=queries + 7)] * 2, Config())
    with pytest.raises(ValueError, match="break_even depends on s1; allowed: whole numbers"):
        _ = dynamic.threshold
    filled = dynamic.substitute({queries: 2, unrelated: 3})
    expected = CostModel.of([dataclasses.replace(LARGE, query_len=2, context=9)] * 2, Config())
    assert filled == expected
    assert filled.threshold == expected.threshold


def test_describe_shows_formulas_numbers_and_the_result() -> None:
    model = CostModel.of([LARGE] * 36, Config())
    text = model.describe()
    assert "36 site(s)" in text
    assert "36 x SiteShape(batch=4, query_heads=32" in text
    assert "S = 1/18 of the steps are slow; M = 1718 memory slots" in text
    for name in FORMULAS:
        assert f"  {name} in all = {getattr(model, name)}\n" in text
    assert f"  dense_bytes of a site = {FORMULAS['dense_bytes']}\n" in text
    assert text.endswith(f"threshold (memory or break-even): {model.threshold} tokens")


def test_as_dict_is_plain_data() -> None:
    model = CostModel.of([LARGE] * 3, Config())
    data = json.loads(json.dumps(model.as_dict()))
    assert data["sites"] == 3
    assert data["memory_slots"] == 1718
    assert data["slow_share"] == "1/18"
    assert data["break_even"] == model.break_even
    assert data["threshold"] == model.threshold
    assert sympy.sympify(data["dense_bytes"], locals={"N": N}) == model.dense_bytes


def test_no_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="shapes is empty; allowed: at least one SiteShape"):
        CostModel.of([], Config())


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), True, "0.5"])
def test_a_share_outside_0_to_1_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"slow_share is .*; allowed: a number from 0 to 1"):
        CostModel.of([LARGE], Config(), slow_share=share)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", 0),
        ("query_heads", -4),
        ("key_dim", 64.0),
        ("value_dim", True),
        ("query_len", None),
        ("context", sympy.Integer(0)),
        ("itemsize", sympy.Rational(1, 2)),
        ("batch", -sympy.Symbol("s0", positive=True)),
        ("query_len", N),
        ("masked", 1),
        ("repeats_heads", None),
    ],
)
def test_a_wrong_size_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"site shape: {name} is .*; allowed: "):
        dataclasses.replace(LARGE, **{name: value})


def test_query_heads_must_share_kv_heads_evenly() -> None:
    with pytest.raises(ValueError, match="query_heads is 30; allowed: multiples of 8"):
        dataclasses.replace(LARGE, query_heads=30)


@st.composite
def site_shapes(draw: st.DrawFn) -> SiteShape:
    kv_heads = draw(st.integers(1, 16))
    return SiteShape(
        batch=draw(st.integers(1, 64)),
        query_heads=kv_heads * draw(st.integers(1, 16)),
        kv_heads=kv_heads,
        key_dim=draw(st.integers(1, 576)),
        value_dim=draw(st.integers(1, 576)),
        query_len=draw(st.integers(1, 8)),
        context=draw(st.integers(1, 2**20)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8])),
        repeats_heads=draw(st.booleans()),
        masked=draw(st.booleans()),
    )


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(site_shapes(), min_size=1, max_size=4),
    k_head=st.integers(1, 2**16),
    share=st.one_of(st.none(), st.fractions(0, 1), st.floats(0, 1)),
)
def test_break_even_is_the_crossover(shapes: list[SiteShape], k_head: int, share: Fraction | float | None) -> None:
    config = Config(k_head=k_head)
    model = CostModel.of(shapes, config, share)
    found = model.break_even
    if found is None:
        for context in (1, 10**4, 10**9):
            dense, mean = dense_and_mean(model, context)
            assert mean >= dense
        assert model.threshold is None
        return
    for context in (found, found + 1, 10 * found + 10**6):
        dense, mean = dense_and_mean(model, context)
        assert mean < dense
    if found > 0:
        dense, mean = dense_and_mean(model, found - 1)
        assert mean >= dense
    assert model.threshold == max(found, config.memory_slots)
    wider = CostModel.of(shapes, dataclasses.replace(config, k_head=k_head + 1), share).break_even
    assert wider is not None
    assert wider >= found
