"""insert_guards: golden graphs of the smallest step, the state that it adds, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfi_compile.compat.dynamo import example
from sfi_compile.config import PRESETS, Config, SelectorSpec
from sfi_compile.passes.insert_guards import memory_layout, of_site
from tests.passes.toys import (
    OPTIONS,
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
)

SHARED = "sfi_slow_rows, sfi_refreshed_at, sfi_status, sfi_context"


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="older Dynamo orders the inputs of a graph otherwise")
def test_the_guarded_graph() -> None:
    recorded = record(minimal, *operands())
    same_text(
        recorded.graph,
        """
        (l_keys_, l_pos_, l_k_, l_values_, l_v_, l_q_)
        index_copy_ = l_keys_.index_copy_(2, l_pos_, l_k_)
        index_copy__2 = l_values_.index_copy_(2, l_pos_, l_v_)
        arange = arange(8)
        le = le(arange, l_pos_)
        getitem = getitem(le, (None, None, None))
        scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_keys_, l_values_, attn_mask=getitem)
        return (scaled_dot_product_attention)
        """,
    )
    with unchanged(recorded.graph):
        work = compiled(recorded.module, "insert_guards", preset="paper-speed")
    same_text(
        work.graph.graph,
        f"""
        (l_keys_, l_pos_, l_k_, l_values_, l_v_, l_q_, {SHARED}, sfi_held_0, sfi_mem_k_0, sfi_mem_v_0)
        any = any(sfi_slow_rows)
        index_copy_ = l_keys_.index_copy_(2, l_pos_, l_k_)
        index_copy__2 = l_values_.index_copy_(2, l_pos_, l_v_)
        arange = arange(8)
        le = le(arange, l_pos_)
        getitem = getitem(le, (None, None, None))
        remainder = remainder(l_pos_, 8)
        sfi_slow_0 = self.sfi_slow_0
        sfi_fast_0 = self.sfi_fast_0
        cond = cond(any, sfi_slow_0, sfi_fast_0, (l_q_, l_keys_, l_values_, getitem, remainder, {SHARED}, \
sfi_held_0, sfi_mem_k_0, sfi_mem_v_0))
        getitem_2 = getitem(cond, 0)
        return (getitem_2)
        """,
    )
    same_text(
        branch(work, "sfi_fast_0"),
        f"""
        (q, k, v, mask, sfi_position, {SHARED}, sfi_held, sfi_mem_k, sfi_mem_v)
        index_select = aten.index_select(k, 2, sfi_position)
        index_select_2 = aten.index_select(v, 2, sfi_position)
        append = sfi.append(index_select, index_select_2, sfi_position, sfi_refreshed_at, 3, 2, sfi_held, sfi_mem_k, \
sfi_mem_v)
        gather = sfi.gather(mask, sfi_held, '111s')
        memory_attention = sfi.memory_attention(q, sfi_mem_k, sfi_mem_v, sfi_held, gather, 0.7071)
        return (memory_attention)
        """,
    )
    same_text(
        branch(work, "sfi_slow_0"),
        f"""
        (q, k, v, mask, sfi_position, {SHARED}, sfi_held, sfi_mem_k, sfi_mem_v)
        frame = sfi.frame(mask, sfi_slow_rows, sfi_position, SPEC, 3, 7)
        getitem = getitem(frame, 0)
        getitem_2 = getitem(frame, 1)
        getitem_3 = getitem(frame, 2)
        dense_attention = sfi.dense_attention(q, k, v, mask, sfi_slow_rows, getitem, 0.7071, sfi_status, sfi_context)
        getitem_4 = getitem(dense_attention, 0)
        getitem_5 = getitem(dense_attention, 1)
        select = sfi.select(getitem_5, k, sfi_slow_rows, sfi_status, getitem, getitem_2, SPEC)
        pack = sfi.pack(k, v, select, getitem_3, sfi_slow_rows, sfi_status, 1, sfi_held, sfi_mem_k, sfi_mem_v)
        return (getitem_4)
        """,
    )


def test_in_a_batch_the_slow_branch_serves_fast_rows_from_memory() -> None:
    work = compiled(record(minimal, *operands(batch=2)).module, "insert_guards")
    lines = text(branch(work, "sfi_slow_0")).splitlines()
    order = ["frame", "dense_attention", "append", "memory_attention", "select", "pack", "where"]
    found = [line.split(" = ")[0] for line in lines]
    assert [name for name in found if name in order] == order, "appended before: `pack` has the last word on slow rows"
    assert lines[-6:] == [
        "reshape = aten.reshape(sfi_slow_rows, [2, 1, 1, 1, 1])",
        "reshape_2 = aten.reshape(getitem_4, [2, 1, 1, 1, 2])",
        "reshape_3 = aten.reshape(memory_attention, [2, 1, 1, 1, 2])",
        "where = where(reshape, reshape_2, reshape_3)",
        "reshape_4 = aten.reshape(where, [2, 1, 1, 2])",
        "return (reshape_4)",
    ]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_state_inputs_are_static_and_last(preset: str) -> None:
    inputs = operands(batch=2, query_heads=2, kv_heads=2, dim=4)
    recorded = record(minimal, *inputs[:2], tensor(2, 2, 1, 3), inputs[3], tensor(2, 2, 8, 3), inputs[5])
    work = compiled(recorded.module, preset=preset)
    shapes = {s.name: (s.shape, s.dtype) for s in work.state}
    keeps_history = preset == "balanced"
    assert shapes == {
        "sfi_slow_rows": ((2,), torch.bool),
        "sfi_refreshed_at": ((2,), torch.int64),
        "sfi_status": ((2,), torch.int64),
        "sfi_context": ((2,), torch.int64),
        **({"sfi_since": ((2,), torch.int64)} if keeps_history else {}),
        "sfi_held_0": ((2, 2, 7), torch.int64),
        "sfi_mem_k_0": ((2, 2, 7, 4), torch.float32),
        "sfi_mem_v_0": ((2, 2, 7, 3), torch.float32),
        **({"sfi_history_0": ((2, 2, 16), torch.float32)} if keeps_history else {}),
    }
    for graph in (work.graph.graph, *(m.graph for m in work.variants)):
        added = [n for n in graph.nodes if n.op == "placeholder"][-len(shapes) :]
        assert [n.name for n in added] == list(shapes)
        for node in added:
            assert (tuple(example(node).shape), example(node).dtype) == shapes[node.name]
            assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}
            assert node._dynamo_source is None


@pytest.mark.parametrize(("options", "more"), [({"policy": "h2o"}, ""), ({}, ", values=v")])
def test_a_history_is_written_before_it_is_read_and_in_slow_steps_alone(options: dict[str, str], more: str) -> None:
    """And a policy that looks at the values gets them."""
    work = compiled(record(minimal, *operands()).module, "insert_guards", **options)
    shared = f"{SHARED}, sfi_since"
    state_names = [s.name for s in work.state]
    assert state_names == [*shared.split(", "), "sfi_held_0", "sfi_mem_k_0", "sfi_mem_v_0", "sfi_history_0"]
    assert (work.state[-1].shape, work.state[-1].dtype) == ((1, 1, 16), torch.float32), "padded"
    lines = text(branch(work, "sfi_slow_0")).splitlines()
    at = next(i for i, line in enumerate(lines) if "accumulate" in line)
    given = "getitem_5, sfi_slow_rows, sfi_status, getitem, sfi_since, SPEC, sfi_history"
    assert lines[at] == f"accumulate = sfi.accumulate({given})"
    asked = "getitem_5, k, sfi_slow_rows, sfi_status, getitem, getitem_2, SPEC, history=sfi_history" + more
    assert lines[at + 1] == f"select = sfi.select({asked})"
    fast = "".join(text(branch(work, "sfi_fast_0")).splitlines()[1:])
    assert "sfi_history" not in fast
    assert "sfi_since" not in fast


def test_where_sequences_began_is_told_to_earlier_queries_alone() -> None:
    """A history's `sfi_since` is beside it, and not in its place."""
    work = compiled(record(minimal, *operands()).module, "insert_guards", evidence_window=3)
    names = [s.name for s in work.state]
    assert names[:6] == [*SHARED.split(", "), "sfi_started_at", "sfi_since"]
    assert names[6:] == [f"sfi_{n}_0" for n in ("held", "mem_k", "mem_v", "queries", "history")]


def test_sites_have_the_budgets_that_their_policy_gives_them() -> None:
    def function(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, keys2: Tensor, values2: Tensor
    ) -> Tensor:
        return minimal(minimal(q, k, v, keys, values, pos), k, v, keys2, values2, pos)

    inputs = operands()
    recorded = record(function, *inputs, *(t.clone() for t in inputs[3:5]))
    options = {"policy": "pyramidkv(queries=1)", "k_head": 3}
    work = compiled(recorded.module, "insert_guards", **options)
    sizes = {s.name: s.shape[2] for s in work.state if "_held_" in s.name or "_mem_" in s.name}
    wanted = {f"sfi_{name}_{i}": 1 + k + 2 + 2 for i, k in ((0, 5), (1, 1)) for name in ("held", "mem_k", "mem_v")}
    assert sizes == wanted
    config, sites = Config.from_options({**OPTIONS, **options}), work.matched.sites
    own = [of_site(config, site, i, 2) for i, site in enumerate(sites)]
    assert [memory_layout(site, mine) for site, mine in zip(sites, own, strict=True)] == [(6, 10), (2, 6)]
    assert sum(sizes[f"sfi_held_{i}"] for i in range(2)) == 2 * config.memory_slots, "what the cost model counts with"
    for i, k in ((0, 5), (1, 1)):
        for name in ("frame", "select"):
            [node] = [n for n in branch(work, f"sfi_slow_{i}").nodes if n.name.startswith(name)]
            [spec] = [a for a in node.args if isinstance(a, str)]
            assert SelectorSpec.from_text(spec).k_head == k
    assert of_site(Config.from_options(OPTIONS), sites[0], 0, 2) == Config.from_options(OPTIONS)


def test_two_sites_share_the_predicate_and_a_rejected_one_stays() -> None:
    def function(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, keys2: Tensor, values2: Tensor
    ) -> Tensor:
        out = minimal(q, k, v, keys, values, pos)
        out = SDPA(out, keys.roll(1, 2), values)
        return minimal(out, k, v, keys2, values2, pos)

    inputs = operands()
    recorded = record(function, *inputs, *(t.clone() for t in inputs[3:5]))
    work = compiled(recorded.module, "insert_guards")
    conds = [n for n in work.graph.graph.nodes if n.target is torch.ops.higher_order.cond]
    assert [c.args[0].name for c in conds] == ["sfi_any_slow", "sfi_any_slow"]
    dense = [n for n in work.graph.graph.nodes if n.target is SDPA]
    assert len(dense) == 1
    assert dense[0].args[0].args[0] is conds[0]
    of_site = ("held", "mem_k", "mem_v", "history")
    assert [s.name for s in work.state[5:]] == [f"sfi_{n}_{i}" for i in (0, 1) for n in of_site]


def test_a_site_may_read_another_directly() -> None:
    """The first site's value is the second's query and what it caches."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, keys2: Tensor, values2: Tensor
    ) -> Tensor:
        out = minimal(q, k, v, keys, values, pos)
        return minimal(out, out, v, keys2, values2, pos)

    inputs = operands()
    recorded = record(function, *inputs, *(t.clone() for t in inputs[3:5]))
    work = compiled(recorded.module)
    first, second = work.matched.sites
    assert second.query is second.writes[0].value is first.form.node
    found = work.variants[0](*recorded.fresh(), *state(work, slow=True))[0]
    torch.testing.assert_close(found, recorded.module(*recorded.fresh())[0])


def test_no_budget_is_larger_than_the_context() -> None:
    site = compiled(record(minimal, *operands()).module, "insert_guards").matched.sites[0]
    assert memory_layout(site, Config.from_options(OPTIONS)) == (3, 7)
    assert memory_layout(site, Config.from_options({**OPTIONS, "k_head": 1000})) == (9, 13)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_guarded_graphs_run_as_they_stand(preset: str) -> None:
    """With real tensors and the real `cond`: slow is dense and fills the memory, fast attends to it."""
    recorded = record(minimal, *operands(at=5))
    work = compiled(recorded.module, "insert_guards", preset=preset, k_head=8)
    inputs, expected, kept = recorded.fresh(), recorded.fresh(), state(work, slow=True)
    names = [s.name for s in work.state]
    out = work.graph(*inputs, *kept)[0]
    torch.testing.assert_close(out, recorded.module(*expected)[0])
    held, mem_k = (kept[names.index(name)][0, 0] for name in ("sfi_held_0", "sfi_mem_k_0"))
    assert held.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, 4, 5, -1, -1]
    keys = inputs[recorded.index("l_keys_")]
    assert torch.equal(mem_k[held >= 0], keys[0, 0, held[held >= 0]])
    kept[0].fill_(False)
    kept[1].fill_(5)
    for tensors in (inputs, expected):
        tensors[recorded.index("l_pos_")].fill_(6)
    out = work.graph(*inputs, *kept)[0]
    assert held.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, 4, 5, 6, -1]
    torch.testing.assert_close(out, recorded.module(*expected)[0])
    assert all(torch.equal(a, b) for a, b in zip(inputs, expected, strict=True))
