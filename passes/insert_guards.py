"""insert_guards: each site becomes `cond(any slow row, slow, fast)`, and the state becomes extra static inputs.

The slow branch holds dense attention and the selector subgraph; the fast branch appends the new token to the memory and
attends to the memory. In a batch, rows that are not slow take the memory path inside the slow branch too, so that a
row's result does not depend on its batch mates. In the fast branch, keys, values and mask are still gathered from the
context-sized values (`sfi::gather`): pushing those gathers to the roots is `commute_gather`'s work.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import add_static_input, copy_graph_module, example, new_graph_module
from sfi_compile.config import Config
from sfi_compile.passes import axes
from sfi_compile.passes.base import Builder, Pass, StateTensor, Work, substituted, transfer
from sfi_compile.site import Site

SHARED = ("sfi_slow_rows", "sfi_refreshed_at", "sfi_status", "sfi_context")
"""State that all sites share: bool [B], then three int64 [B]."""
PER_SITE = ("sfi_held", "sfi_mem_k", "sfi_mem_v")
"""State of one site: positions [B, Hkv, S], keys [B, Hkv, S, Dk], values [B, Hkv, S, Dv]."""


def memory_layout(site: Site, config: Config) -> tuple[int, int]:
    """(first slot of the recent segment, slots in all) of a site's memory. The selection never exceeds the context."""
    selected_end = config.sink + min(config.k_head, site.context)
    return selected_end, selected_end + config.recent + config.refresh_interval


def state_of(sites: tuple[Site, ...], config: Config) -> tuple[StateTensor, ...]:
    """The extra inputs, in order."""
    first = sites[0]
    dtypes = (torch.bool, torch.int64, torch.int64, torch.int64)
    state = [StateTensor(n, (first.batch,), t, first.device) for n, t in zip(SHARED, dtypes, strict=True)]
    for i, site in enumerate(sites):
        slots = memory_layout(site, config)[1]
        base = (site.batch, site.kv_heads, slots)
        state.append(StateTensor(f"sfi_held_{i}", base, torch.int64, site.device))
        state.append(StateTensor(f"sfi_mem_k_{i}", (*base, site.key_dim), site.dtype, site.device))
        state.append(StateTensor(f"sfi_mem_v_{i}", (*base, site.value_dim), site.dtype, site.device))
    return tuple(state)


@dataclasses.dataclass(frozen=True)
class InsertGuards(Pass):
    """Rewrites a private copy of the graph; the sites of `work.match` are carried over to it."""

    name: ClassVar[str] = "insert_guards"

    def apply(self, work: Work) -> Work:
        """The guarded graph."""
        module = copy_graph_module(work.graph)
        match = transfer(work.matched, work.graph.graph, module.graph)
        builder = Builder(module.graph)
        state = state_of(match.sites, work.config)
        inputs = {s.name: add_static_input(module.graph, s.name, s.allocate(), builder.mode) for s in state}
        last = [n for n in module.graph.nodes if n.op == "placeholder"][-1]
        with module.graph.inserting_after(last):
            predicate = builder.call(torch.any, inputs["sfi_slow_rows"])
            predicate.name = "sfi_any_slow"
        with module.graph.inserting_before(match.sites[0].node):
            # One for all sites, and a copy, because a layer may count on in place.
            inputs["sfi_position"] = builder.method("clone", match.sites[0].position)
            inputs["sfi_position"].name = "sfi_position"
        replaced: dict[fx.Node, fx.Node] = {}
        for i in range(len(match.sites)):
            site = match.sites[i]
            replaced[site.node] = _guard_site(module, builder, site, i, predicate, inputs, work)
            # A later site may read this one's value directly.
            match = substituted(match, lambda n: replaced.get(n, n))
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module, match=match, state=state)


def _guard_site(
    module: fx.GraphModule,
    builder: Builder,
    site: Site,
    number: int,
    predicate: fx.Node,
    inputs: dict[str, fx.Node],
    work: Work,
) -> fx.Node:
    """Replace one attention node; the node that now holds its value."""
    names = ("q", "k", "v", "mask", "position", "sfi_position", *SHARED, *PER_SITE)
    operands = (
        *(site.query, site.key, site.value, site.mask, site.position),
        *(inputs[name] for name in ("sfi_position", *SHARED)),
        *(inputs[f"{name}_{number}"] for name in PER_SITE),
    )
    values = dict(zip(names, (example(n) for n in operands), strict=True))
    with module.graph.inserting_before(site.node):
        branches = []
        for label, build in (("slow", _slow_branch), ("fast", _fast_branch)):
            branch = _branch(values, site, work, build)
            attribute = f"sfi_{label}_{number}"
            module.add_submodule(attribute, branch)
            branches.append(module.graph.get_attr(attribute))
        cond = module.graph.call_function(torch.ops.higher_order.cond, (predicate, *branches, operands))
        cond.name = f"sfi_cond_{number}"
        cond.meta["example_value"] = (example(site.node),)
        cond.meta["nn_module_stack"] = site.node.meta.get("nn_module_stack", {})
        out = module.graph.call_function(operator.getitem, (cond, 0))
        out.meta["example_value"] = example(site.node)
    site.node.replace_all_uses_with(out)
    module.graph.erase_node(site.node)
    return out


def _branch(values: dict[str, Any], site: Site, work: Work, build: Any) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["example_value"] = value
    out = build(Builder(graph), nodes, site, work)
    graph.output((out,))
    return new_graph_module(torch.nn.Module(), graph)


def _fast_branch(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> fx.Node:
    sfi = torch.ops.sfi
    selected_end, _ = memory_layout(site, work.config)
    new_k = b.call(sfi.gather.default, n["k"], n["position"], _layout(n["k"], "bhsd"), "bhsd")
    new_v = b.call(sfi.gather.default, n["v"], n["position"], _layout(n["v"], "bhsd"), "bhsd")
    memory = (n["sfi_held"], n["sfi_mem_k"], n["sfi_mem_v"])
    token = (new_k, new_v, n["position"], n["sfi_refreshed_at"])
    b.call(sfi.append.default, *token, selected_end, work.config.recent, *memory)
    mask = b.call(sfi.gather.default, n["mask"], n["sfi_held"], _layout(n["mask"], "bhqs"), "bhqs")
    held, mem_k, mem_v = memory
    return b.call(sfi.memory_attention.default, n["q"], mem_k, mem_v, held, mask, site.scale)


def _slow_branch(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> fx.Node:
    sfi = torch.ops.sfi
    spec = work.config.selector().to_text()
    rows, status = n["sfi_slow_rows"], n["sfi_status"]
    # Fast rows first: `pack` then rewrites the memory of the slow rows, whatever was appended to it.
    remembered = _fast_branch(b, n, site, work) if site.batch > 1 else None
    layout = memory_layout(site, work.config)
    extent, log_position, held = _parts(b, 3, sfi.frame.default, n["mask"], rows, n["sfi_position"], spec, *layout)
    attended = (n["q"], n["k"], n["v"], n["mask"], rows, extent)
    found = (work.min_context, status, n["sfi_context"])
    out, logits = _parts(b, 2, sfi.dense_attention.default, *attended, site.scale, *found)
    selected = b.call(sfi.select.default, logits, n["k"], rows, status, extent, log_position, spec)
    memory = (n["sfi_held"], n["sfi_mem_k"], n["sfi_mem_v"])
    b.call(sfi.pack.default, n["k"], n["v"], selected, held, rows, status, work.config.sink, *memory)
    if remembered is None:
        return out
    flags = b.call(torch.ops.aten.reshape.default, rows, [site.batch, 1, 1, 1])
    return b.call(torch.where, flags, out, remembered)


def _parts(b: Builder, count: int, target: Any, *args: Any) -> tuple[fx.Node, ...]:
    whole = b.call(target, *args)
    return tuple(b.call(operator.getitem, whole, i) for i in range(count))


def _layout(node: fx.Node, letters: str) -> str:
    return axes.named(letters, tuple(example(node).shape))
