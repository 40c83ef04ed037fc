"""verify: what it must catch when a pass goes wrong, and what it must not mistake for work on the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.compat.dynamo import copy_graph_module
from sfi_compile.passes.base import Builder, ContextSizedError, VerificationError, Work
from sfi_compile.passes.commute_gather import CommuteGather
from sfi_compile.passes.shapes import shape_of
from sfi_compile.passes.unswitch import Unswitch
from sfi_compile.passes.verify import Verify, context_sized
from tests.passes.toys import SDPA, check_step, compiled, minimal, operands, record, tensor, text, unchanged, written

N = 8


def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Keys scaled and repeated to the query heads."""
    mask = written(k, v, keys, values, pos)
    batch, heads, size, dim = keys.shape
    repeated = (keys * 2)[:, :, None].expand(batch, heads, 2, size, dim).reshape(batch, heads * 2, size, dim)
    return SDPA(q, repeated, values.repeat_interleave(2, dim=1), attn_mask=mask)


def good(function: Callable[..., Any] = grouped, *extra: Tensor, **sizes: int) -> Work:
    inputs = operands(**{"query_heads": 4, "kv_heads": 2, **sizes})
    return compiled(record(function, *inputs, *extra).module, "unswitch")


def edited(work: Work, change: Callable[[fx.Graph, Builder], None], variant: str = "fast") -> Work:
    """The work with a changed copy of its slow or fast graph."""
    module = copy_graph_module(getattr(work, variant))
    change(module.graph, Builder(module.graph))
    module.recompile()
    changes: dict[str, Any] = {variant: module}
    return dataclasses.replace(work, **changes)


def find(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if name in n.name)


def test_it_changes_nothing_and_twice_is_once() -> None:
    work = good()
    slow, fast = work.variants
    with unchanged(work.graph.graph), unchanged(slow.graph), unchanged(fast.graph):
        assert Verify().apply(work) is work
        assert Verify().apply(work) is work


def test_a_gather_that_was_not_commuted() -> None:
    """Unswitching the guarded graph at once leaves gathers of keys that are scaled in full."""
    guarded = compiled(record(grouped, *operands(query_heads=4, kv_heads=2)).module, "insert_guards")
    with pytest.raises(VerificationError, match=rf"works on the whole context \({N}\): .*le = "):
        Verify().apply(Unswitch().apply(guarded))
    Verify().apply(Unswitch().apply(CommuteGather().apply(guarded)))


def expanded_gather(graph: fx.Graph, builder: Builder) -> None:
    """Put back the gather of keys that are repeated to the query heads."""
    append, root, position = find(graph, "append"), find(graph, "l_keys_"), find(graph, "l_pos_")
    with graph.inserting_before(append):
        repeated = builder.method("expand", builder.method("unsqueeze", root, 2), -1, -1, 2, -1, -1)
        full = builder.method("reshape", repeated, 1, 4, N, 2)
        token = builder.call(torch.ops.aten.index_select.default, full, 2, position)
        append.args = (builder.call(torch.narrow, token, 1, 0, 2), *append.args[1:])


def summed_cache(graph: fx.Graph, builder: Builder) -> None:
    """A sum over the context has no axis of its size left."""
    append, root = find(graph, "append"), find(graph, "l_keys_")
    with graph.inserting_before(append):
        token = builder.method("sum", root, 2, keepdim=True)
        append.args = (token, *append.args[1:])


def contiguous_cache(graph: fx.Graph, builder: Builder) -> None:
    """Copy a permuted cache before the gather."""
    append, root, position = find(graph, "append"), find(graph, "l_keys_"), find(graph, "l_pos_")
    with graph.inserting_before(append):
        full = builder.method("contiguous", builder.method("transpose", root, 1, 2))
        token = builder.call(torch.ops.aten.index_select.default, full, 1, position)
        append.args = (builder.method("transpose", token, 1, 2), *append.args[1:])


def full_mask(graph: fx.Graph, builder: Builder) -> None:
    """Compute the mask for every position and gather from it."""
    attention, held = find(graph, "memory_attention"), find(graph, "sfi_held_0")
    with graph.inserting_before(attention):
        arange = builder.call(torch.arange, N)
        arange.name = "arange"
        mask = builder.call(torch.le, arange, find(graph, "l_pos_"))
        gathered = builder.call(torch.ops.sfi.gather.default, mask, held, "s")
    attention.args = (*attention.args[:4], gathered, *attention.args[5:])


def dense_after_all(graph: fx.Graph, builder: Builder) -> None:
    """The operator of the slow path in the fast graph."""
    attention = find(graph, "memory_attention")
    rows, status, context = (find(graph, f"sfi_{n}") for n in ("slow_rows", "status", "context"))
    with graph.inserting_before(attention):
        keys, values = find(graph, "l_keys_"), find(graph, "l_values_")
        mask = builder.call(torch.ones, 1, 1, 1, N)
        extent = builder.call(torch.ones, 1, 3, dtype=torch.int64)
        arguments = (attention.args[0], keys, values, mask, rows, extent, 1.0, status, context)
        both = builder.call(torch.ops.sfi.dense_attention.default, *arguments)
        attention.replace_all_uses_with(builder.call(lambda pair: pair[0], both))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (expanded_gather, "reshape"),
        (contiguous_cache, "contiguous"),
        (summed_cache, "sum"),
        (full_mask, "arange"),
        (dense_after_all, "dense_attention"),
    ],
)
def test_work_on_the_context_in_the_fast_graph(change: Callable[[fx.Graph, Builder], None], named: str) -> None:
    with pytest.raises(VerificationError, match=rf"the fast graph works on the whole context \({N}\): {named}"):
        Verify().apply(edited(good(), change))


@pytest.mark.parametrize("variant", ["slow", "fast"])
def test_a_lost_cache_write(variant: str) -> None:
    def lose(graph: fx.Graph, builder: Builder) -> None:
        graph.erase_node(find(graph, "index_copy__1"))

    with pytest.raises(VerificationError, match=f"the {variant} graph lost the writes index_copy__1"):
        Verify().apply(edited(good(), lose, variant))


@pytest.mark.parametrize("variant", ["slow", "fast"])
def test_a_cond_left_over(variant: str) -> None:
    work = compiled(record(minimal, *operands()).module, "unswitch")
    with pytest.raises(VerificationError, match=f"the {variant} graph still holds a cond"):
        Verify().apply(dataclasses.replace(work, **{variant: work.graph}))


def test_an_illegal_graph() -> None:
    def disorder(graph: fx.Graph, builder: Builder) -> None:
        append = find(graph, "append")
        find(graph, "memory_attention").append(append)
        append.prepend(find(graph, "l_pos_"))

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        Verify().apply(edited(good(), disorder))


def test_before_unswitching_there_is_nothing_to_verify() -> None:
    with pytest.raises(VerificationError, match="not been unswitched"):
        Verify().apply(compiled(record(minimal, *operands()).module, "commute_gather"))


class TestNotTheContext:
    """Equal sizes, and work that is the model's own."""

    def test_hidden_size_and_vocabulary_equal_the_context(self) -> None:
        def function(
            q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, w: Tensor, ids: Tensor
        ) -> Tensor:
            x = torch.nn.functional.embedding(ids, w)
            q = torch.nn.functional.linear(x, w)[:, None] + q
            k, v = (torch.nn.functional.gelu(t @ w) for t in (k, v))
            out = minimal(q, k, v, keys, values, pos)
            logits = torch.nn.functional.linear(out, w).softmax(-1)
            return logits + torch.arange(N)

        work = good(function, tensor(N, N), torch.tensor([[3]]), dim=N, query_heads=1, kv_heads=1)
        assert Verify().apply(work) is work
        shapes = [shape_of(n) for n in work.variants[1].graph.nodes if n.op == "call_function"]
        assert sum(N in shape for shape in shapes if shape) > 5

    def test_the_model_may_use_cache_and_mask_for_itself(self) -> None:
        def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, valid: Tensor) -> Any:
            count = valid.cumsum(-1)
            mask = written(k, v, keys, values, pos) & valid
            return SDPA(q, keys, values, attn_mask=mask), mask, count.amax(), (keys * 2).mean()

        extra = torch.ones(1, 1, 1, N, dtype=torch.bool)
        work = good(function, extra, query_heads=1, kv_heads=1)
        assert Verify().apply(work) is work
        assert "cumsum" in text(work.variants[1].graph)

    def test_dense_attention_beside_it_works_on_its_own_context(self) -> None:
        def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
            out = minimal(q, k, v, keys, values, pos)
            return SDPA(out, keys.roll(1, 2), values)

        work = good(function, query_heads=1, kv_heads=1)
        assert Verify().apply(work) is work

    def test_what_serves_both_the_model_and_the_memory_still_counts(self) -> None:
        """A full mask that the model returns may exist; a value computed from it for the memory alone may not."""

        def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
            mask = written(k, v, keys, values, pos)
            return SDPA(q, keys, values, attn_mask=mask), mask

        def reuse(graph: fx.Graph, builder: Builder) -> None:
            attention, held = find(graph, "memory_attention"), find(graph, "sfi_held_0")
            output = next(n for n in graph.nodes if n.op == "output")
            mask: Any = output.args[0]
            with graph.inserting_before(attention):
                inverse = builder.call(torch.logical_not, mask[1])
                gathered = builder.call(torch.ops.sfi.gather.default, inverse, held, "111s")
            attention.args = (*attention.args[:4], gathered, *attention.args[5:])

        work = good(function, query_heads=1, kv_heads=1)
        assert Verify().apply(work) is work
        with pytest.raises(VerificationError, match="logical_not"):
            Verify().apply(edited(work, reuse))


def test_context_sized_names_the_nodes() -> None:
    guarded = compiled(record(minimal, *operands()).module, "insert_guards")
    late = Unswitch().apply(guarded).variants[1].graph
    sources = {"l_keys_", "l_values_", "arange"}
    assert [n.name for n in context_sized(late, N, sources)] == ["arange", "le", "mask"]
    assert context_sized(late, N + 1, sources) == []
    assert context_sized(late, N, set()) == [], "an equal size that comes from elsewhere is not the context"


def _reducing(use: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        q, mask = use(q, written(k, v, keys, values, pos))
        return SDPA(q, keys, values, attn_mask=mask)

    return function


def test_what_queries_need_of_the_mask_is_the_models_own_work() -> None:
    work = compiled(record(_reducing(lambda q, mask: (q * mask.sum(), mask)), *operands()).module, "verify")
    assert len(work.matched.sites) == 1


def test_a_mask_that_is_reduced_has_an_error_of_its_own() -> None:
    """Which the backend takes for a rejection."""
    module = record(_reducing(lambda q, mask: (q, mask & mask.any(-1, keepdim=True))), *operands()).module
    with pytest.raises(ContextSizedError, match="whole context"):
        compiled(module, "verify")


def test_dense_attention_before_it_works_on_its_own_context() -> None:
    """Its output is the query of a site, without a residual; both masks come from one arange."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        out = SDPA(q, keys.roll(1, 2), values, attn_mask=mask)
        return SDPA(out, keys, values, attn_mask=mask)

    work = compiled(record(function, *operands()).module, "verify")
    assert (len(work.matched.sites), len(work.matched.rejections)) == (1, 1)


def test_a_running_count_over_an_input_may_stay() -> None:
    """Positions beside padding: as long as the context, but without heads and features."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, padding: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        place = (padding.long().cumsum(-1) - 1) * padding
        bias = torch.where(mask, place[:, None, None] * 0.5, float("-inf"))
        return SDPA(q, keys, values, attn_mask=bias)

    padding = torch.ones(1, N, dtype=torch.int64)
    padding[:, :2] = 0
    work = check_step(function, *operands(), padding, tolerance=1e-5)
    named = {n.target for n in work.variants[1].graph.nodes}
    assert "cumsum" in named
    assert not {torch.where, torch.mul} & {n.target for n in work.variants[1].graph.nodes if _long(n)}


def _long(node: fx.Node) -> bool:
    return N in (shape_of(node) or ())
