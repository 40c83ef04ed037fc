"""unswitch: one decision a step. Golden graphs, refusals, and equality with the guarded graph on real tensors."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes.base import VerificationError, Work
from sfi_compile.passes.unswitch import Unswitch
from tests.passes.toys import (
    SDPA,
    Recorded,
    compiled,
    minimal,
    operands,
    record,
    same_text,
    state,
    tensor,
    text,
    unchanged,
)

STATE = "sfi_slow_rows, sfi_refreshed_at, sfi_status, sfi_context, sfi_held_0, sfi_mem_k_0, sfi_mem_v_0"
COND = torch.ops.higher_order.cond


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="older Dynamo orders the inputs of a graph otherwise")
def test_the_two_graphs() -> None:
    guarded = compiled(record(minimal, *operands()).module, "commute_gather", preset="paper-speed")
    with unchanged(guarded.graph.graph):
        slow, fast = Unswitch().apply(guarded).variants
    same_text(
        fast.graph,
        f"""
        (l_keys_, l_pos_, l_k_, l_values_, l_v_, l_q_, {STATE})
        index_copy_ = l_keys_.index_copy_(2, l_pos_, l_k_)
        index_copy__2 = l_values_.index_copy_(2, l_pos_, l_v_)
        remainder = remainder(l_pos_, 8)
        append = sfi.append(l_k_, l_v_, remainder, sfi_refreshed_at, 3, 2, sfi_held_0, sfi_mem_k_0, sfi_mem_v_0)
        clamp = clamp(sfi_held_0, 0)
        reshape = reshape(clamp, (1, 1, 1, 7))
        reshape_2 = reshape(l_pos_, (1, 1, 1, 1))
        le = le(reshape, reshape_2)
        memory_attention = sfi.memory_attention(l_q_, sfi_mem_k_0, sfi_mem_v_0, sfi_held_0, le, 0.7071)
        return (memory_attention)
        """,
    )
    same_text(
        slow.graph,
        f"""
        (l_keys_, l_pos_, l_k_, l_values_, l_v_, l_q_, {STATE})
        index_copy_ = l_keys_.index_copy_(2, l_pos_, l_k_)
        index_copy__2 = l_values_.index_copy_(2, l_pos_, l_v_)
        arange = arange(8)
        le = le(arange, l_pos_)
        getitem = getitem(le, (None, None, None))
        remainder = remainder(l_pos_, 8)
        frame = sfi.frame(getitem, sfi_slow_rows, remainder, SPEC, 3, 7)
        getitem_2 = getitem(frame, 0)
        getitem_3 = getitem(frame, 1)
        getitem_4 = getitem(frame, 2)
        dense_attention = sfi.dense_attention(l_q_, l_keys_, l_values_, getitem, sfi_slow_rows, getitem_2, 0.7071, \
sfi_status, sfi_context)
        getitem_5 = getitem(dense_attention, 0)
        getitem_6 = getitem(dense_attention, 1)
        select = sfi.select(getitem_6, l_keys_, sfi_slow_rows, sfi_status, getitem_2, getitem_3, SPEC)
        pack = sfi.pack(l_keys_, l_values_, select, getitem_4, sfi_slow_rows, sfi_status, 1, sfi_held_0, sfi_mem_k_0, \
sfi_mem_v_0)
        return (getitem_5)
        """,
    )
    for module in (slow, fast):
        assert not [name for name, _ in module.named_children()], "no branch is left behind"


def test_sites_under_one_mask_share_a_frame() -> None:
    def function(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor, one: Tensor, two: Tensor) -> Tensor:
        keys.index_copy_(2, pos, q)
        values.index_copy_(2, pos, q)
        for mask in (one, two, one):
            q = SDPA(q, keys, values, attn_mask=mask)
        return q

    masks = [tensor(1, 1, 1, 8, seed=i) for i in (3, 4)]
    inputs = (tensor(1, 1, 1, 2), tensor(1, 1, 8, 2, seed=1), tensor(1, 1, 8, 2, seed=2), torch.tensor([5]))
    slow, fast = compiled(record(function, *inputs, *masks).module, "unswitch").variants
    count = {name: text(slow.graph).count(f"= sfi.{name}(") for name in ("frame", "dense_attention")}
    assert count == {"frame": 2, "dense_attention": 3}
    assert "sfi.frame(" not in text(fast.graph)


def test_a_mask_written_between_sites_has_a_frame_for_each() -> None:
    def function(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        keys.index_copy_(2, pos, q)
        values.index_copy_(2, pos, q)
        q = SDPA(q, keys, values, attn_mask=mask[None, None])
        mask.fill_(0)
        return SDPA(q, keys, values, attn_mask=mask[None, None])

    inputs = (tensor(1, 1, 1, 2), tensor(1, 1, 8, 2, seed=1), tensor(1, 1, 8, 2, seed=2), torch.tensor([5]))
    slow, _ = compiled(record(function, *inputs, tensor(1, 8, seed=3)).module, "unswitch").variants
    assert text(slow.graph).count("= sfi.frame(") == 2


def two_layers(
    x: Tensor, w: Tensor, keys: Tensor, values: Tensor, keys2: Tensor, values2: Tensor, pos: Tensor, length: Tensor
) -> Tensor:
    """Two sites, a residual, dense attention over another input, and a counter."""
    length.add_(1)
    x = x + minimal(x @ w, x, -x, keys, values, pos)
    x = x + SDPA(x, keys2[:, :, :3], keys2[:, :, :3])
    return x + minimal(x, x @ w, x, keys2, values2, pos) * length


def layered(batch: int) -> Recorded:
    x = tensor(batch, 2, 1, 2)
    caches = (tensor(batch, 2, 8, 2, seed=i) for i in range(1, 5))
    return record(two_layers, x, tensor(2, 2), *caches, torch.tensor([5]), torch.tensor(5))


@pytest.mark.parametrize("batch", [1, 2])
def test_both_graphs_do_what_the_guarded_graph_does(batch: int) -> None:
    """Outputs, caches, and state, for either value of the predicate and for a mixed batch."""
    recorded = layered(batch)
    work = compiled(recorded.module, "unswitch")
    slow, fast = work.variants
    kept = state(work, slow=True)
    given = recorded.fresh()
    for step in range(3):
        flags = torch.tensor([step == 0 or (step == 2 and row == 0) for row in range(batch)])
        kept[0].copy_(flags)
        mine = [t.clone() for t in (*given, *kept)]
        theirs = [t.clone() for t in (*given, *kept)]
        expected = work.graph(*theirs)[0]
        found = (slow if flags.any() else fast)(*mine)[0]
        assert torch.equal(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        given, kept = tuple(mine[: len(given)]), mine[len(given) :]
        given[recorded.index("l_pos_")].add_(1)
        if step == 0:
            kept[1].fill_(5)


def test_slow_is_dense() -> None:
    recorded = layered(2)
    work = compiled(recorded.module, "unswitch")
    given, expected = recorded.fresh(), recorded.fresh()
    found = work.variants[0](*given, *state(work, slow=True))[0]
    torch.testing.assert_close(found, recorded.module(*expected)[0])
    torch.testing.assert_close(given, expected)  # caches and counter


def guarded() -> Work:
    return compiled(layered(1).module, "commute_gather")


def edited(work: Work, predicate: str) -> Work:
    """A copy whose second cond reads another predicate."""
    module: Any = copy.deepcopy(work.graph)
    conds = [n for n in module.graph.nodes if n.target is COND]
    with module.graph.inserting_before(conds[1]):
        if predicate == "another":
            other = module.graph.call_function(torch.any, (conds[1].args[0],))
        else:
            value = next(iter(conds[0].users))
            other = module.graph.call_function(torch.any, (value,))
    for cond in conds[1:] if predicate == "another" else conds:
        cond.args = (other, *cond.args[1:])
    return dataclasses.replace(work, graph=module)


class TestRefusals:
    """What must not be unswitched is a defect of an earlier pass, and named."""

    def test_no_guarded_site(self) -> None:
        work = compiled(record(minimal, *operands()).module, "unswitch")
        for module in work.variants:
            with pytest.raises(VerificationError, match="no guarded site"):
                Unswitch().apply(Work(work.config, module))

    def test_two_predicates(self) -> None:
        with pytest.raises(VerificationError, match="do not share one predicate"):
            Unswitch().apply(edited(guarded(), "another"))

    def test_a_predicate_that_depends_on_a_site(self) -> None:
        with pytest.raises(VerificationError, match="cannot be evaluated before every site"):
            Unswitch().apply(edited(guarded(), "a result"))

    def test_a_cond_used_as_a_whole(self) -> None:
        work = guarded()
        output: fx.Node = next(n for n in work.graph.graph.nodes if n.op == "output")
        cond = next(n for n in work.graph.graph.nodes if n.target is COND)
        output.args = ((cond,),)
        with pytest.raises(VerificationError, match="uses a cond as a whole"):
            Unswitch().apply(work)


def test_the_rest_of_the_graph_stays() -> None:
    recorded = layered(1)
    slow, fast = compiled(recorded.module, "unswitch").variants
    for module in (slow, fast):
        lines = text(module.graph)
        assert lines.count("index_copy_(") == 4
        assert lines.count("scaled_dot_product_attention(") == 1, "dense attention stays dense in both"
        assert "length_.add_(1)" in lines
