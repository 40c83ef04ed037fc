"""lower: the fast path's operators become plain aten and compute the same; the slow path's and the model's stay."""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile import ops, policies
from sfi_compile.compat.dynamo import example, fake_mode_of
from sfi_compile.config import Config
from sfi_compile.kernels import attended_cuda, lowering
from sfi_compile.ops import RowStatus, device
from sfi_compile.passes import lower, pipeline
from sfi_compile.passes.base import Builder, VerificationError, Work
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.insert_guards import InsertGuards
from sfi_compile.passes.lower import Lower
from tests.passes.toys import (
    OPTIONS,
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
    written,
)

WITH_KERNELS = ("sfi", "reach", "h2o", "topk")
"""Policies that a GPU selects by."""
ENOUGH = 4.0
"""Share of the cache that two sites here take together: their eight positions are padded to sixteen."""


def half_masked(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
    """A float mask given as an input: its gather reaches `lower`."""
    written(k, v, keys, values, pos)
    return SDPA(q, keys, values, attn_mask=mask)


def inputs(batch: int) -> tuple[Tensor, ...]:
    return *operands(batch=batch, query_heads=4, kv_heads=4), tensor(batch, 1, 1, 8)


def operators(graph: fx.Graph) -> set[str]:
    return set(re.findall(r"sfi\.(\w+)", text(graph)))


PRESET = pytest.mark.parametrize("preset", ["balanced", "paper-speed"])
"""With a history, which is the default, and without."""


@PRESET
@pytest.mark.parametrize("batch", [1, 2])
def test_fast_operators_go_and_slow_ones_stay(batch: int, preset: str) -> None:
    work = compiled(record(half_masked, *inputs(batch)).module, "verify", preset=preset)
    slow, fast = work.variants
    memory = {"gather", "append", "memory_attention"}
    refresh = {"frame", "dense_attention", "select", "pack"} | ({"accumulate"} if preset == "balanced" else set())
    assert operators(fast.graph) == memory
    assert operators(slow.graph) == refresh | (memory if batch > 1 else set())
    model = [line for line in text(fast.graph).splitlines() if "index_copy_(" in line]
    slow, fast = Lower().apply(work).variants
    assert operators(fast.graph) == set()
    assert operators(slow.graph) == refresh
    assert [line for line in text(fast.graph).splitlines() if "index_copy_(" in line] == model
    assert "sfi.memory_attention" not in fast.code, "recompiled"
    mode = fake_mode_of(fast.graph)
    for module in (slow, fast):
        for node in module.graph.nodes:
            value = example(node)
            assert not isinstance(value, torch.Tensor) or value.fake_mode is mode, f"{node.name} left the fake mode"


@PRESET
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_no_operator_asks_the_host(batch: int, preset: str) -> None:
    work = compiled(record(half_masked, *inputs(batch)).module, "verify", preset=preset)
    slow, fast = Lower(kernels=True).apply(work).variants
    assert operators(fast.graph) == {"memory_attention"}
    remembered = {"memory_attention", "still"} if batch > 1 else set()
    assert operators(slow.graph) == {"dense_decode", "append_rows", "refresh_rows"} | remembered
    ours = [n for module in (slow, fast) for n in module.graph.nodes if "sfi." in str(n.target)]
    assert not [n for n in ours if torch.Tag.cudagraph_unsafe in n.target.tags]
    # One operator writes the memory as far as Inductor knows: it need copy nothing. Whoever reads it comes after that,
    # and before the memory is made anew.
    given = {n.name: n for n in slow.graph.nodes if n.op == "placeholder"}
    for node in (given[name] for name in ("sfi_held_0", "sfi_mem_k_0", "sfi_mem_v_0")):
        writer, *readers, maker = sorted(node.users, key=list(slow.graph.nodes).index)
        assert writer.target is torch.ops.sfi.append_rows.default
        assert maker.target is torch.ops.sfi.refresh_rows.default
        assert bool(readers) == (batch > 1)
    # That nothing reads a history beside its writer is why nobody need be told that it is written.
    assert ("sfi_history_0" in given) == (preset == "balanced")
    for name in {"sfi_history_0", "sfi_since"} & set(given):
        assert [n.target for n in given[name].users] == [torch.ops.sfi.refresh_rows.default]


def two_sites(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pos: Tensor) -> Tensor:
    mask = (torch.arange(a.shape[2]) <= pos)[None, None, None]
    written(k, v, a, b, pos)
    out = SDPA(q, a, b, attn_mask=mask)
    written(out + k, v, c, d, pos)
    return SDPA(out, c, d, attn_mask=mask)


def pipeline_of_dense(recorded: Recorded) -> Work:
    """The slow steps of the best dense decoding: nothing is selected."""
    work = pipeline.run(pipeline.ANALYSIS, Work(Config.from_options({**OPTIONS, "min_context": 0}), recorded.module))
    passes = [InsertGuards(refresh=False) if p.name == "insert_guards" else p for p in pipeline.REWRITE]
    return pipeline.run(passes[:-1], work, first_stage=len(pipeline.ANALYSIS))


def two_alike(batch: int) -> Recorded:
    q, k, v, keys, values, pos = operands(batch=batch, query_heads=4, kv_heads=4)
    return record(two_sites, q, k, v, keys, values, keys.clone(), values.clone(), pos)


@PRESET
@pytest.mark.parametrize("share", [ENOUGH, 0.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_sites_that_are_alike_make_their_memories_at_once(
    batch: int, share: float, preset: str, monkeypatch: Any
) -> None:
    """As far as the scratch memory that it takes allows."""
    monkeypatch.setattr(lower, "SCRATCH", share)
    slow, _ = Lower(kernels=True).apply(compiled(two_alike(batch).module, "verify", preset=preset)).variants
    nodes = list(slow.graph.nodes)
    made = [n for n in nodes if n.target is torch.ops.sfi.refresh_rows.default]
    dense = [n for n in nodes if n.target is torch.ops.sfi.dense_decode.default]
    assert len(dense) == 2
    if share:
        assert nodes.index(made[0]) > nodes.index(dense[1])
    lists = [[n for node in made for n in node.args[i]] for i in range(9)]
    assert [len(found) for found in lists] == [*[2] * 5, 2 if preset == "balanced" else 0, *[2] * 3]
    assert len(made) == (1 if share else 2)
    for i, of_dense in enumerate((1, 2, 3)):
        assert [n.args for n in lists[i]] == [(node, of_dense) for node in dense]
    # Before a site's memory is made, its row's status says whether its output was finite.
    flow = DataFlow(slow.graph)
    for refresh in made:
        settled = [w for w in flow.writes(refresh.args[11]) if nodes.index(w) < nodes.index(refresh)]
        assert {*refresh.args[1]} <= set().union(*(flow.slice_of(w) for w in settled))
    for keys_of_site, memory in zip(lists[3], lists[7], strict=True):
        [append] = [n for n in memory.users if n.target is torch.ops.sfi.append_rows.default]
        assert append.args[0] is keys_of_site
    of_site = [["history"] if preset == "balanced" else [], ["held"], ["mem_k"], ["mem_v"]]
    for found, names in zip(lists[5:], of_site, strict=True):
        assert [n.name for n in found] == [f"sfi_{name}_{i}" for i in (0, 1) for name in names]


@pytest.mark.parametrize(
    ("options", "keeps_history", "by_value"),
    [
        ({}, True, True),
        ({"policy": "sfi"}, False, False),
        ({"policy": "h2o"}, True, False),
        ({"policy": "topk"}, False, False),
    ],
)
def test_a_refresh_is_given_what_its_policy_reads(options: Any, keeps_history: bool, by_value: bool) -> None:
    """Histories of the sites, and since when they fade; and the norms of the values in place of those of the keys."""
    slow, fast = Lower(kernels=True).apply(compiled(two_alike(2).module, "verify", **options)).variants
    nodes = list(slow.graph.nodes)
    made = [n.args for n in nodes if n.target is torch.ops.sfi.refresh_rows.default]
    dense = [n.args for n in nodes if n.target is torch.ops.sfi.dense_decode.default]
    assert [args[10] for args in dense] == [by_value] * 2
    assert all(len(args[5]) == (len(args[0]) if keeps_history else 0) for args in made)
    histories = [n.name for args in made for n in args[5]]
    assert histories == (["sfi_history_0", "sfi_history_1"] if keeps_history else [])
    assert {args[13].name for args in made} == {"sfi_position"}
    assert {args[14].name for args in made} == {"sfi_since" if keeps_history else "sfi_status"}
    policy = {ops.slow.parse_spec(args[16]).policy for args in made}
    assert policy == {options.get("policy", "reach")}
    assert not [n for graph in (slow.graph, fast.graph) for n in graph.nodes if "accumulate" in str(n.target)]


def test_what_went_wrong_at_any_site_is_the_rows_status() -> None:
    """Five rows: fine, not finite at the first site, at the last, looking ahead, and with nothing to attend to."""
    fine = torch.zeros(5, 2, 3)
    first, last = fine.clone(), fine.clone()
    first[1, 1, 2], last[2, 0, 0] = torch.nan, torch.nan
    first[0, 0, 0] = last[4, 0, 0] = -torch.inf  # a query that may attend to nothing
    extent = torch.tensor([[4, 4, 0], [4, 4, 0], [4, 4, 1], [4, 6, 1], [0, 1, 0]])
    slow, status = torch.tensor([True] * 5), torch.zeros(5, dtype=torch.int64)
    device.settle(slow, extent, status, first, fine, last)
    broken, ahead, short = RowStatus.NOT_FINITE, RowStatus.AHEAD, RowStatus.SHORT
    assert status.tolist() == [RowStatus.READY, broken, broken, ahead, short]
    # What is worse stays, and rows that are not slow are left alone.
    status = torch.full((5,), int(RowStatus.SPLIT))
    device.settle(slow, extent, status, fine)
    assert all(found >= RowStatus.SPLIT for found in status.tolist())
    status.zero_()
    device.settle(~slow, extent, status, first, last)
    assert not status.any()


def test_sites_without_a_memory_tell_their_status_too() -> None:
    work = pipeline_of_dense(two_alike(2))
    slow = Lower(kernels=True).apply(work).variants[0]
    flow = DataFlow(slow.graph)
    [status] = [n for n in slow.graph.nodes if n.name == "sfi_status"]
    lse = [n for n in slow.graph.nodes if n.target is operator.getitem and n.args[1] == 2
           and n.args[0].target is torch.ops.sfi.dense_decode.default]  # fmt: skip
    assert len(lse) == 2
    assert {*lse} <= set().union(*(flow.slice_of(w) for w in flow.writes(status)))


def computed_keys(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pos: Tensor) -> Tensor:
    mask = (torch.arange(a.shape[2]) <= pos)[None, None, None]
    written(k, v, a, b, pos)
    out = SDPA(q, a * 0.5, b, attn_mask=mask)
    written(out + k, v, c, d, pos)
    return SDPA(out, c * 0.5, d, attn_mask=mask)


def test_keys_that_are_computed_are_not_kept_for_others(monkeypatch: Any) -> None:
    """They are as large as the context, and the append reads those that dense attention was given."""
    monkeypatch.setattr(lower, "SCRATCH", ENOUGH)
    q, k, v, keys, values, pos = operands(batch=2, query_heads=4, kv_heads=4)
    recorded = record(computed_keys, q, k, v, keys, values, keys.clone(), values.clone(), pos)
    slow, _ = Lower(kernels=True).apply(compiled(recorded.module, "verify")).variants
    order = [str(n.target).removeprefix("sfi.").split(".")[0] for n in slow.graph.nodes if "sfi." in str(n.target)]
    of_site = ["dense_decode", "append_rows", "memory_attention", "refresh_rows"]
    assert [name for name in order if name != "still"] == of_site * 2


@pytest.mark.parametrize("batch", [1, 2])
def test_lowered_graphs_compute_the_same(batch: int) -> None:
    """Bit for bit, state included."""
    recorded = record(half_masked, *inputs(batch))
    results = []
    for stage in ("verify", "lower"):
        work = compiled(recorded.module, stage)
        slow, fast = work.variants
        given, kept = recorded.fresh(), state(work, slow=True)
        first = slow(*given, *kept)[0]
        kept[0].fill_(False)
        kept[1].fill_(5)
        given[recorded.index("l_pos_")].fill_(6)
        second = fast(*given, *kept)[0]
        kept[0][0] = True
        given[recorded.index("l_pos_")].fill_(7)
        third = slow(*given, *kept)[0]
        results.append((first, second, third, *given, *kept))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_computed_fill_has_no_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU, too, plain torch computes the step then, and one line says why."""

    def two_fills(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        blocked = ~(written(k, v, keys, values, pos) & (mask > 0))
        scores = (q @ keys.mT).masked_fill(blocked, -1e9).masked_fill(blocked & (torch.arange(8) < 3), -1e4)
        return scores.softmax(-1) @ values

    monkeypatch.setattr(lowering, "supports", lambda *_: None)
    assert "kernel-fill" in without_kernels(compiled(record(two_fills, *inputs(1)).module, "verify"), caplog)


@pytest.mark.parametrize(
    "policy",
    [
        *("fresh", "random(seed=3)", "snapkv", "streaming", "pyramidkv(queries=1)"),
        f"reach(ahead={attended_cuda.MOST_AHEAD + 1})",
    ],
)
def test_other_policies_have_no_kernels(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where sites have budgets of their own."""
    monkeypatch.setattr(lowering, "supports", lambda *_: None)
    every_step = {"refresh_interval": 1} if policy == "fresh" else {}
    work = compiled(two_alike(1).module, "verify", policy=policy, **every_step)
    assert f"kernel-policy: policy {policy!r}" in without_kernels(work, caplog)


@pytest.mark.parametrize(
    "policy",
    [*WITH_KERNELS, "h2o(decay=0.5)", "reach(weight=0.0)", f"reach(ahead={attended_cuda.MOST_AHEAD})"],
)
def test_the_papers_policy_and_scores_made_of_attention_have_kernels(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lowering, "supports", lambda *_: None)
    work = compiled(two_alike(1).module, "verify", policy=policy)
    with caplog.at_level(logging.WARNING, "sfi_compile"):
        slow, fast = Lower().apply(on_a_gpu(work)).variants
    assert operators(slow.graph) == {"dense_decode", "append_rows", "refresh_rows"}
    assert operators(fast.graph) == {"memory_attention"}
    assert not [r for r in caplog.records if r.name.startswith("sfi")]


def test_every_policy_of_the_package_is_above() -> None:
    every = [policies.parse(name) for name in policies.names()]
    ours = {p.name: p.attended for p in every if type(p).__module__.startswith("sfi_compile.policies.")}
    assert {name for name, attended in ours.items() if attended} == {*WITH_KERNELS} - {"sfi"}
    assert {*ours} - {*WITH_KERNELS} == {"fresh", "random", "snapkv", "streaming", "pyramidkv"}


@pytest.mark.parametrize("batch", [1, 2])
def test_sites_with_budgets_of_their_own_make_their_memories_apart(batch: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(lower, "SCRATCH", ENOUGH)
    work = compiled(two_alike(batch).module, "verify", policy="pyramidkv(queries=1)", k_head=3)
    slow, fast = Lower(kernels=True).apply(work).variants
    made = [n.args for n in slow.graph.nodes if n.target is torch.ops.sfi.refresh_rows.default]
    assert [ops.slow.parse_spec(args[16]).k_head for args in made] == [5, 1]
    for args, slots in zip(made, (10, 6), strict=True):
        [held], [mem_k], [mem_v] = args[6:9]
        assert {int(example(n).shape[-1]) for n in (held, args[9])} == {slots}
        assert {int(example(n).shape[2]) for n in (mem_k, mem_v)} == {slots}
    attended = [n.args for n in fast.graph.nodes if n.target is torch.ops.sfi.memory_attention.default]
    assert [int(example(args[1]).shape[2]) for args in attended] == [10, 6]


def test_earlier_queries_have_no_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lowering, "supports", lambda *_: None)
    work = compiled(record(minimal, *operands()).module, "verify", evidence_window=2)
    assert "kernel-window: queries of earlier tokens" in without_kernels(work, caplog)


def test_under_a_mask_that_adds_a_bias_only_the_own_queries_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    for function, given, kept in ((minimal, operands(), True), (half_masked, inputs(1), False)):
        caplog.clear()
        work = compiled(record(function, *given).module, "verify", evidence_window=2)
        assert any(s.name == "sfi_queries_0" for s in work.state) == kept
        assert ("masks that add numbers" in caplog.text) != kept
        for graph in (work.variants[0].graph, work.variants[1].graph):
            assert ("remember" in operators(graph)) == kept


def on_a_gpu(work: Work) -> Work:
    """The same graphs, told that they are a GPU's."""
    state = [dataclasses.replace(s, device=torch.device("cuda")) for s in work.state]
    return dataclasses.replace(work, state=tuple(state))


def without_kernels(work: Work, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged as the graphs, told to be a GPU's, become plain torch."""
    with caplog.at_level(logging.WARNING, "sfi_compile"):
        slow, fast = Lower().apply(on_a_gpu(work)).variants
    assert operators(slow.graph) - {"accumulate"} == {"frame", "dense_attention", "select", "pack"}
    assert operators(fast.graph) == set()
    [line] = [r.getMessage() for r in caplog.records if r.name.startswith("sfi")]
    return line


def test_sites_that_look_alike_keep_what_differs() -> None:
    """Same shapes, other scale, other axes of the mask: each kind of operator is traced for itself."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *more: Tensor) -> Tensor:
        keys2, values2, *masks = more
        written(k, v, keys, values, pos)
        out = SDPA(q, keys, values, attn_mask=masks[0], scale=0.25)
        written(out, v, keys2, values2, pos)
        return SDPA(out, keys2, values2, attn_mask=masks[1].permute(2, 3, 0, 1), scale=4.0)

    first, caches = operands(batch=2, query_heads=2, kv_heads=2, size=2), (tensor(2, 2, 2, 2, seed=i) for i in (7, 8))
    given = (*first[:5], torch.tensor([0]), *caches, tensor(2, 1, 1, 2, seed=5), tensor(1, 2, 2, 1, seed=6))
    recorded = record(function, *given)
    results = []
    for stage in ("verify", "lower"):
        work = compiled(recorded.module, stage)
        kept, inputs = state(work, slow=True), recorded.fresh()
        slow = work.variants[0](*inputs, *kept)[0]
        kept[0].fill_(False)
        inputs[recorded.index("l_pos_")].fill_(1)
        results.append((slow, work.variants[1](*inputs, *kept)[0], *kept))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def single(*arguments: Any, operator: Any = torch.ops.sfi.gather.default, **keywords: Any) -> fx.GraphModule:
    """A graph of one operator on the inputs of a recorded one."""
    recorded = record(lambda x, index: (x * 1, index * 1), tensor(1, 5, 1), torch.tensor([[[3, 1]]]))
    graph = recorded.graph
    x, index = recorded.node("l_x_"), recorded.node("l_index_")
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        made = Builder(graph).call(operator, x, index, *arguments, **keywords)
    output.args = ((made,),)
    graph.eliminate_dead_code()
    recorded.module.recompile()
    return recorded.module


def lowered(module: fx.GraphModule) -> fx.GraphModule:
    other = single("1s1")
    return Lower().apply(Work(compiled_config(), module, slow=module, fast=other)).variants[0]


def compiled_config() -> Any:
    return compiled(record(minimal, *operands()).module, "verify").config


def test_a_gather_is_one_indexing() -> None:
    module = lowered(single("1s1"))
    same_text(
        module.graph,
        """
        (l_x_, l_index_)
        zeros = aten.zeros([1, 1, 1, 1], dtype=torch.int64, device=device(type='cpu'), pin_memory=False)
        clamp_min = aten.clamp_min(l_index_, 0)
        unsqueeze = aten.unsqueeze(clamp_min, 2)
        zeros_2 = aten.zeros([1, 1, 1, 1], dtype=torch.int64, device=device(type='cpu'), pin_memory=False)
        index = aten.index(l_x_, [zeros, unsqueeze, zeros_2])
        return (index)
        """,
    )
    x = tensor(1, 5, 1, seed=9)
    assert torch.equal(module(x, torch.tensor([[[3, -1]]]))[0].flatten(), x[0, [3, 0], 0])


def test_twice_is_once() -> None:
    work = Lower().apply(compiled(record(half_masked, *inputs(2)).module, "verify"))
    before = [text(m.graph) for m in work.variants]
    assert [text(m.graph) for m in Lower().apply(work).variants] == before


def test_graphs_without_operators_stay() -> None:
    recorded = record(half_masked, *inputs(1))
    before = text(recorded.graph)
    Lower().apply(Work(compiled_config(), recorded.module, slow=recorded.module, fast=recorded.module))
    assert text(recorded.graph) == before


def test_operators_take_positional_arguments() -> None:
    module = single(layout="1s1")
    with pytest.raises(VerificationError, match="positional arguments only"):
        lowered(module)


def test_every_operator_with_a_plain_body_is_lowered() -> None:
    assert set(ops.plain) == {"gather", "append", "memory_attention", "remember"}
    for name in ops.plain:
        assert isinstance(getattr(torch.ops.sfi, name).default, torch._ops.OpOverload)
