"""commute_gather: golden fast branches, what it must not touch, idempotence, and the real `cond` before and after."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

import torch
from torch import Tensor, fx

from sfi_compile.passes.base import Work
from sfi_compile.passes.commute_gather import CommuteGather
from tests.passes.toys import (
    SDPA,
    branch,
    compiled,
    minimal,
    operands,
    record,
    same_text,
    state,
    tensor,
    text,
    unchanged,
    written,
)

SHARED = "sfi_slow_rows, sfi_refreshed_at, sfi_status, sfi_context"
ENTRY = f"q, k, v, mask, sfi_position, {SHARED}, sfi_held, sfi_mem_k, sfi_mem_v"
APPEND = "append = sfi.append({}, {}, sfi_position, sfi_refreshed_at, 3, 2, sfi_held, sfi_mem_k, sfi_mem_v)"
ATTEND = "memory_attention = sfi.memory_attention(q, sfi_mem_k, sfi_mem_v, sfi_held, {}, 0.7071)"


def fast(work: Work) -> fx.Graph:
    return branch(work, "sfi_fast_0")


def test_written_values_and_a_mask_from_positions() -> None:
    """No gather is left: the new token is what was written, and arange at a position is the position."""
    work = compiled(record(minimal, *operands()).module, "commute_gather", preset="paper-speed")
    same_text(
        fast(work),
        f"""
        ({ENTRY}, from_l_k_, from_l_v_, from_l_pos_)
        {APPEND.format("from_l_k_", "from_l_v_")}
        clamp = clamp(sfi_held, 0)
        reshape = reshape(clamp, (1, 1, 1, 7))
        reshape_2 = reshape(from_l_pos_, (1, 1, 1, 1))
        le = le(reshape, reshape_2)
        {ATTEND.format("le")}
        return (memory_attention)
        """,
    )


def quantised(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, scale: Tensor) -> Tensor:
    """A transposed int8 cache, dequantised for every step."""
    keys.index_copy_(1, pos, k)
    values.index_copy_(1, pos, v)
    mask = (torch.arange(keys.shape[1]) <= pos)[None, None, None]
    return SDPA(q, keys.transpose(1, 2).float() * scale, values.transpose(1, 2).float() / scale, attn_mask=mask)


def quantised_operands(batch: int = 1, heads: int = 1) -> tuple[Tensor, ...]:
    q, *rest, pos = operands(batch=batch, query_heads=heads, kv_heads=heads)
    turned = ((t * 20).to(torch.int8).transpose(1, 2).contiguous() for t in rest)
    return q, *turned, pos, tensor(heads, 1, 1).abs() + 1


def test_dequantisation_is_redone_on_the_token() -> None:
    work = compiled(record(quantised, *quantised_operands()).module, "commute_gather", preset="paper-speed")
    same_text(
        fast(work),
        f"""
        ({ENTRY}, from_l_k_, from_l_scale_, from_l_v_, from_l_pos_)
        transpose = from_l_k_.transpose(1, 2)
        float = transpose.float()
        mul = mul(float, from_l_scale_)
        transpose_2 = from_l_v_.transpose(1, 2)
        float_2 = transpose_2.float()
        truediv = truediv(float_2, from_l_scale_)
        {APPEND.format("mul", "truediv")}
        clamp = clamp(sfi_held, 0)
        reshape = reshape(clamp, (1, 1, 1, 7))
        reshape_2 = reshape(from_l_pos_, (1, 1, 1, 1))
        le = le(reshape, reshape_2)
        {ATTEND.format("le")}
        return (memory_attention)
        """,
    )


def padded(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, valid: Tensor, rows: Tensor
) -> Tensor:
    """A padding table, looked up as (row, position), and cached positions up to this one."""
    causal = written(k, v, keys, values, pos)
    return SDPA(q, keys, values, attn_mask=causal & valid.to(torch.bool)[rows, torch.arange(keys.shape[2])])


def rows(batch: int) -> Tensor:
    return torch.arange(batch)[:, None, None, None]


def test_a_padding_table_is_looked_up_at_the_memory() -> None:
    recorded = record(padded, *operands(), torch.ones(1, 8), rows(1))
    work = compiled(recorded.module, "commute_gather", preset="paper-speed")
    same_text(
        fast(work),
        f"""
        ({ENTRY}, from_l_k_, from_l_v_, from_l_pos_, from_l_rows_, from_l_valid_)
        {APPEND.format("from_l_k_", "from_l_v_")}
        clamp = clamp(sfi_held, 0)
        reshape = reshape(clamp, (1, 1, 1, 7))
        reshape_2 = reshape(from_l_pos_, (1, 1, 1, 1))
        le = le(reshape, reshape_2)
        clamp_2 = clamp(sfi_held, 0)
        reshape_3 = reshape(clamp_2, (1, 1, 1, 7))
        index = aten.index(from_l_valid_, [from_l_rows_, reshape_3])
        to = index.to(torch.bool)
        and_ = and_(le, to)
        {ATTEND.format("and_")}
        return (memory_attention)
        """,
    )


def test_a_row_of_a_causal_table_is_never_copied() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, table: Tensor) -> Tensor:
        written(k, v, keys, values, pos)
        return SDPA(q, keys, values, attn_mask=table[None, None, pos])

    recorded = record(function, *operands(), torch.ones(8, 8, dtype=torch.bool).tril())
    same_text(
        fast(compiled(recorded.module, "commute_gather", preset="paper-speed")),
        f"""
        ({ENTRY}, from_l_k_, from_l_v_, from_l_pos_, from_l_table_)
        {APPEND.format("from_l_k_", "from_l_v_")}
        gather = sfi.gather(from_l_table_, sfi_held, 'qs', from_l_pos_)
        {ATTEND.format("gather")}
        return (memory_attention)
        """,
    )
    compiled(recorded.module, "verify")


def masked(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
    """A mask given as an input."""
    written(k, v, keys, values, pos)
    return SDPA(q, keys, values, attn_mask=mask)


def test_a_gather_that_reads_an_input_stays() -> None:
    recorded = record(masked, *operands(), torch.ones(1, 1, 1, 8, dtype=torch.bool))
    before, after = (compiled(recorded.module, stage) for stage in ("insert_guards", "commute_gather"))
    line = "sfi.gather(mask, sfi_held, '111s'"
    assert line in text(fast(before))
    assert line in text(fast(after))
    assert text(fast(after)).count("sfi.gather") == 1


def test_a_float_mask_keeps_its_dtype_and_scalars_their_rank() -> None:
    """A 0-d float32 scalar does not widen bfloat16; with axes it would."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, scale: Tensor) -> Tensor:
        mask = torch.arange(8, dtype=torch.bfloat16) * scale
        written(k, v, keys, values, pos)
        return SDPA(q, keys * scale, values, attn_mask=mask[None, None, None])

    inputs = [t.bfloat16() if t.is_floating_point() else t for t in operands()]
    work = compiled(record(function, *inputs, torch.tensor(0.1)).module, "commute_gather")
    made = [n.meta["example_value"].dtype for n in fast(work).nodes if n.target is operator.mul]
    assert made == [torch.bfloat16] * 2
    assert ".to(torch.bfloat16)" in text(fast(work)), "arange had this dtype; positions are int64"


def test_the_slow_branch_stays_but_for_its_memorys_mask() -> None:
    before = compiled(record(quantised, *quantised_operands(batch=2, heads=2)).module, "insert_guards")
    with unchanged(before.graph.graph), unchanged(fast(before)), unchanged(branch(before, "sfi_slow_0")):
        after = CommuteGather().apply(before)
    kept, moved = (text(branch(w, "sfi_slow_0")).splitlines() for w in (before, after))
    look_up = next(i for i, line in enumerate(kept) if line.startswith("gather = "))
    after_it = len(kept) - look_up - 1
    assert kept[1:look_up] == moved[1:look_up]
    assert not any("sfi.gather" in line or "mask" in line for line in moved[look_up:-after_it])
    rest = [re.sub(r"_\d+\b", "", "\n".join(lines[-after_it:])) for lines in (kept, moved)]
    assert rest[0].replace(" gather,", " le,") == rest[1]
    assert moved[0].startswith(kept[0][:-1]), "both branches of a cond take the same operands"
    outside, now = (text(w.graph.graph).splitlines() for w in (before, after))
    assert [a for a, b in zip(outside, now, strict=True) if a != b] == [line for line in outside if "cond(" in line]


def test_twice_is_once() -> None:
    work = compiled(record(padded, *operands(batch=2), torch.ones(2, 8), rows(2)).module, "commute_gather")
    again = CommuteGather().apply(work)
    assert text(again.graph.graph) == text(work.graph.graph)
    for name in ("sfi_slow_0", "sfi_fast_0"):
        assert text(branch(again, name)) == text(branch(work, name))


def test_the_match_moves_along() -> None:
    work = compiled(record(minimal, *operands()).module, "commute_gather")
    nodes = set(work.graph.graph.nodes)
    (site,) = work.matched.sites
    for field in dataclasses.fields(site):
        found: Any = getattr(site, field.name)
        assert not isinstance(found, fx.Node) or found in nodes
    assert {n for w in site.writes for n in (w.node, w.root, w.index, w.value)} | {*site.context_sources} <= nodes
    assert {site.form.node, site.form.original, site.form.result} <= nodes


def test_both_forms_compute_the_same() -> None:
    """The real `cond` on real tensors, slow then fast, before and after the pass: bit for bit."""
    valid = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]])
    for function, inputs in (
        (padded, (*operands(batch=2, query_heads=2, kv_heads=2), valid, rows(2))),
        (quantised, quantised_operands(batch=2, heads=2)),
        (masked, (*operands(batch=2), valid.bool()[:, None, None])),
    ):
        recorded = record(function, *inputs)
        results = []
        for stage in ("insert_guards", "commute_gather"):
            work = compiled(recorded.module, stage)
            given, kept = recorded.fresh(), state(work, slow=True)
            slow = work.graph(*given, *kept)[0]
            kept[0].fill_(False)
            kept[1].fill_(5)
            given[recorded.index("l_pos_")].fill_(6)
            results.append((slow, work.graph(*given, *kept)[0], *given, *kept))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
