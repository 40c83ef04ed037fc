"""insert_guards: each site becomes `cond(any slow row, slow, fast)`, and the state becomes extra static inputs.

The slow branch holds dense attention and the selector subgraph; the fast branch appends the new token to the memory and
attends to the memory. In a batch, rows that are not slow take the memory path inside the slow branch too, so that a
row's result does not depend on its batch mates. In the fast branch, keys, values and mask are still gathered from the
context-sized values (`sfi::gather`): pushing those gathers to the roots is `commute_gather`'s work.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile import policies
from sfi_compile.compat.dynamo import add_static_input, copy_graph_module, example, new_graph_module
from sfi_compile.config import Config
from sfi_compile.kernels.heuristics import padded
from sfi_compile.ops import RowStatus
from sfi_compile.passes import axes
from sfi_compile.passes.base import Builder, Pass, StateTensor, Work, substituted, transfer
from sfi_compile.passes.dataflow import remove_dead
from sfi_compile.passes.shapes import constant_of, shape_of
from sfi_compile.site import CacheWrite, Site

log = logging.getLogger("sfi_compile")

SHARED = {
    "sfi_slow_rows": torch.bool,
    "sfi_refreshed_at": torch.int64,
    "sfi_status": torch.int64,
    "sfi_context": torch.int64,
}
"""State that all sites of a device share, each [B]."""
PER_SITE = ("sfi_held", "sfi_mem_k", "sfi_mem_v")
"""State of one site: positions [B, Hkv, S], keys [B, Hkv, S, Dk], values [B, Hkv, S, Dv]."""
STARTED, QUERIES = "sfi_started_at", "sfi_queries"
"""With an `evidence_window` W: where rows' sequences began, [B], shared, and a site's last queries, [B, Hq, W, Dk]."""
SINCE, HISTORY = "sfi_since", "sfi_history"
"""Of a policy that keeps it: tokens since each row's last slow step, 0 where its sequence begins, [B], shared; and what
a site has attended to, float32 [B, Hkv, N rounded up to whole vectors]."""


def of_site(config: Config, site: Site, number: int, sites: int) -> Config:
    """The options as one of the sites has them: with the budget that the policy gives it.

    Raises:
        ValueError: a policy that gives no budget of at least one.
    """
    policy = policies.parse(config.policy)
    return dataclasses.replace(config, k_head=policies.budget_of(policy, number, sites, config.k_head, site.context))


def memory_layout(site: Site, config: Config) -> tuple[int, int]:
    """(first slot of the recent segment, slots in all) of a site's memory, under its own options (`of_site`). The
    selection never exceeds the context."""
    selected_end = config.sink + min(config.k_head, site.context)
    return selected_end, selected_end + config.recent + config.refresh_interval


def shared_state(config: Config) -> dict[str, torch.dtype]:
    """What all sites of a device share, each [B]."""
    started = {STARTED: torch.int64} if config.evidence_window > 1 else {}
    return {**SHARED, **started, **({SINCE: torch.int64} if _keeps_history(config) else {})}


def site_state(site: Site, config: Config) -> tuple[str, ...]:
    """What each site has for itself."""
    more = (QUERIES,) if _asks_earlier(site, config) else ()
    return (*PER_SITE, *more, HISTORY) if _keeps_history(config) else (*PER_SITE, *more)


def _keeps_history(config: Config) -> bool:
    return policies.parse(config.policy).keeps_history


def _asks_earlier(site: Site, config: Config) -> bool:
    """Whether queries of earlier tokens are evidence: what they saw is known where a mask only blocks."""
    return config.evidence_window > 1 and site.mask is not None and example(site.mask).dtype == torch.bool


def devices_of(sites: tuple[Site, ...]) -> dict[torch.device, str]:
    """Where sites compute, and what the names of the state that they share there end with; the first with nothing."""
    found = dict.fromkeys(site.device for site in sites)
    return {device: f"_{number}" if number else "" for number, device in enumerate(found)}


def state_of(sites: tuple[Site, ...], config: Config) -> tuple[StateTensor, ...]:
    """The extra inputs, in order."""
    first = sites[0]
    devices = devices_of(sites).items()
    state = [
        StateTensor(n + end, (first.batch,), t, where)
        for where, end in devices
        for n, t in shared_state(config).items()
    ]
    for i, site in enumerate(sites):
        slots = memory_layout(site, of_site(config, site, i, len(sites)))[1]
        base = (site.batch, site.kv_heads, slots)
        state.append(StateTensor(f"sfi_held_{i}", base, torch.int64, site.device))
        state.append(StateTensor(f"sfi_mem_k_{i}", (*base, site.key_dim), site.dtype, site.device))
        state.append(StateTensor(f"sfi_mem_v_{i}", (*base, site.value_dim), site.dtype, site.device))
        if _asks_earlier(site, config):
            shape = (site.batch, site.query_heads, max(config.evidence_window, site.query_len), site.key_dim)
            state.append(StateTensor(f"{QUERIES}_{i}", shape, site.dtype, site.device))
        if _keeps_history(config):
            of_all = (site.batch, site.kv_heads, padded(site.context))
            state.append(StateTensor(f"{HISTORY}_{i}", of_all, torch.float32, site.device))
    return tuple(state)


@dataclasses.dataclass(frozen=True)
class InsertGuards(Pass):
    """Rewrites a private copy of the graph; the sites of `work.match` are carried over to it."""

    name: ClassVar[str] = "insert_guards"
    refresh: bool = True
    """Whether slow steps refresh. Without, every step of every row must be slow."""

    def apply(self, work: Work) -> Work:
        """The guarded graph."""
        module = copy_graph_module(work.graph)
        match = transfer(work.matched, work.graph.graph, module.graph)
        if work.config.evidence_window > 1 and not all(_asks_earlier(s, work.config) for s in match.sites):
            log.warning("sfi: masks that add numbers: there, a refresh asks the queries of its own step alone")
        builder = Builder(module.graph)
        state = state_of(match.sites, work.config)
        inputs = {s.name: add_static_input(module.graph, s.name, s.allocate(), builder.mode) for s in state}
        last = [n for n in module.graph.nodes if n.op == "placeholder"][-1]
        with module.graph.inserting_after(last):
            predicate = builder.call(torch.any, inputs["sfi_slow_rows"])
            predicate.name = "sfi_any_slow"
        devices = devices_of(match.sites)
        with module.graph.inserting_before(match.sites[0].form.node):
            # One for all sites, and a copy, because a layer may count on in place.
            position = _positions(builder, match.sites[0].writes[0], match.sites[0].device)
            position.name = "sfi_position"
            for device, end in devices.items():
                inputs[f"sfi_position{end}"] = builder.method("to", position, device) if end else position
        replaced: dict[fx.Node, fx.Node] = {}
        for i in range(len(match.sites)):
            site = match.sites[i]
            own = dataclasses.replace(work, config=of_site(work.config, site, i, len(match.sites)))
            out = _guard_site(module, builder, site, i, predicate, inputs, devices, own, self.refresh)
            replaced[site.form.node] = out
            replaced[site.form.original] = out if site.form.result is site.form.node else site.form.result
            # A later site may read this one's value directly.
            match = substituted(match, lambda n: replaced.get(n, n))
        remove_dead(module.graph)
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module, match=match, forms=(), state=state)


def _positions(builder: Builder, write: CacheWrite, device: torch.device) -> fx.Node:
    """The positions of the step's tokens, int [count], counted from the start of the cache."""
    index, size = write.index, (shape_of(write.root) or ())[write.axis]
    if not isinstance(index, fx.Node) or shape_of(index) is None:
        stop = builder.call(operator.add, index, write.count) if isinstance(index, fx.Node) else index + write.count
        return builder.call(torch.arange, index, stop, device=device)
    counted = builder.call(torch.remainder, index, size)
    return counted if shape_of(index) else builder.method("reshape", counted, 1)


def _guard_site(
    module: fx.GraphModule,
    builder: Builder,
    site: Site,
    number: int,
    predicate: fx.Node,
    inputs: dict[str, fx.Node],
    devices: dict[torch.device, str],
    work: Work,
    refresh: bool,
) -> fx.Node:
    """Replace one canonical attention node, and what it stands for; the node that now holds its value."""
    given = {"q": site.query, "k": site.key, "v": site.value, "mask": site.mask, "sinks": site.sinks, "fill": site.fill}
    named = {name: n for name, n in given.items() if n is not None}
    shared, own = ("sfi_position", *shared_state(work.config)), site_state(site, work.config)
    names = [*named, *shared, *own]
    operands = (
        *named.values(),
        *(inputs[name + devices[site.device]] for name in shared),
        *(inputs[f"{name}_{number}"] for name in own),
    )
    values = dict(zip(names, (example(n) for n in operands), strict=True))
    node = site.form.node
    with module.graph.inserting_before(node):
        branches = []
        slow = _slow_branch if refresh else _dense_branch
        for label, build in (("slow", slow), ("fast", _fast_branch)):
            branch = _branch(values, site, work, build)
            attribute = f"sfi_{label}_{number}"
            module.add_submodule(attribute, branch)
            branches.append(module.graph.get_attr(attribute))
        cond = module.graph.call_function(torch.ops.higher_order.cond, (predicate, *branches, operands))
        cond.name = f"sfi_cond_{number}"
        cond.meta["example_value"] = (example(node),)
        cond.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        out = module.graph.call_function(operator.getitem, (cond, 0))
        out.meta["example_value"] = example(node)
    site.form.original.replace_all_uses_with(site.form.result)
    node.replace_all_uses_with(out)
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
    if QUERIES in n:
        b.call(torch.ops.sfi.remember.default, n["q"], n["sfi_position"], n[QUERIES])
    return _from_memory(b, n, site, work)


def _from_memory(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> fx.Node:
    sfi, position = torch.ops.sfi, n["sfi_position"]
    selected_end, _ = memory_layout(site, work.config)
    new_k, new_v = (b.call(torch.ops.aten.index_select.default, n[x], 2, position) for x in ("k", "v"))
    memory = (n["sfi_held"], n["sfi_mem_k"], n["sfi_mem_v"])
    b.call(sfi.append.default, new_k, new_v, position, n["sfi_refreshed_at"], selected_end, work.config.recent, *memory)
    return _remembered(b, n, site)


def _remembered(b: Builder, n: dict[str, fx.Node], site: Site) -> fx.Node:
    """Attention over the memory, as it is by then."""
    held, mem_k, mem_v = n["sfi_held"], n["sfi_mem_k"], n["sfi_mem_v"]
    layout = axes.named("bhqs", tuple(example(n["mask"]).shape))
    of_queries = layout[1] != "1" and site.group > 1
    at = b.call(torch.ops.aten.repeat_interleave.self_int, held, site.group, 1) if of_queries else held
    mask = b.call(torch.ops.sfi.gather.default, n["mask"], at, layout)
    return b.call(torch.ops.sfi.memory_attention.default, n["q"], mem_k, mem_v, held, mask, *_form(site, n))


def _form(site: Site, n: dict[str, fx.Node]) -> tuple[Any, ...]:
    """Scale, softcap and sinks, the latter two where they differ from their defaults."""
    if site.sinks is not None:
        return site.scale, site.softcap, n["sinks"]
    return (site.scale, site.softcap) if site.softcap else (site.scale,)


def _dense_branch(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> fx.Node:
    return _dense(b, n, site, work)[0]


def _dense(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> tuple[fx.Node, ...]:
    """Output and logits of dense attention, and the parts of the frame."""
    layout: tuple[Any, ...] = memory_layout(site, work.config)
    if site.fill is not None:
        # A number where it is one: sites that have the same share their frame.
        number = constant_of(site.fill)
        layout += (number,) if number is not None else (None, n["fill"])
    spec, rows = work.config.selector().to_text(), n["sfi_slow_rows"]
    frame = _parts(b, 3, torch.ops.sfi.frame.default, n["mask"], rows, n["sfi_position"], spec, *layout)
    attended = (n["q"], n["k"], n["v"], n["mask"], rows, frame[0])
    scale, *rest = _form(site, n) if site.fill is None else (site.scale, site.softcap, n.get("sinks"), n["fill"])
    found = (n["sfi_status"], n["sfi_context"])
    return *_parts(b, 2, torch.ops.sfi.dense_attention.default, *attended, scale, *found, *rest), *frame


def _slow_branch(b: Builder, n: dict[str, fx.Node], site: Site, work: Work) -> fx.Node:
    sfi, spec = torch.ops.sfi, work.config.selector().to_text()
    rows, status = n["sfi_slow_rows"], n["sfi_status"]
    # Of a policy that chooses at every step, all rows are slow, and attend to what was chosen.
    policy = policies.parse(work.config.policy)
    at_once = policy.reads_memory
    # Dense first: keys and values that are computed are then a tensor already, and the append reads that one. Fast rows
    # before `pack`, which rewrites the memory of the slow rows, whatever was appended to it.
    out, logits, extent, log_position, held = _dense(b, n, site, work)
    remembered = _from_memory(b, n, site, work) if site.batch > 1 and not at_once else None
    asked: tuple[Any, ...] = (logits, n["k"], rows, status, extent, log_position, spec)
    if QUERIES in n:
        b.call(sfi.remember.default, n["q"], n["sfi_position"], n[QUERIES])
        asked += (site.scale, site.softcap, n[QUERIES], n["sfi_position"], n[STARTED])
    kept = {"position": n["sfi_position"]} if site.query_len > 1 and QUERIES not in n else {}
    if HISTORY in n:
        kept["history"] = n[HISTORY]
        b.call(sfi.accumulate.default, logits, rows, status, extent, n[SINCE], spec, n[HISTORY])
    if policy.reads_values:
        kept["values"] = n["v"]
    selected = b.call(sfi.select.default, *asked, **kept)
    memory = (n["sfi_held"], n["sfi_mem_k"], n["sfi_mem_v"])
    b.call(sfi.pack.default, n["k"], n["v"], selected, held, rows, status, work.config.sink, *memory)
    dense = rows
    if at_once:
        remembered = _remembered(b, n, site)
        dense = b.call(torch.ops.aten.ne.Scalar, status, int(RowStatus.READY))
    if remembered is None:
        return out
    # By KV head, as attention over the memory leaves its result: indices with quotients take Inductor long to analyse.
    by_group = [site.batch, site.kv_heads, site.group, site.query_len, site.value_dim]
    flags = b.call(torch.ops.aten.reshape.default, dense, [site.batch, 1, 1, 1, 1])
    found = (b.call(torch.ops.aten.reshape.default, x, by_group) for x in (out, remembered))
    chosen = b.call(torch.where, flags, *found)
    return b.call(torch.ops.aten.reshape.default, chosen, list(example(out).shape))


def _parts(b: Builder, count: int, target: Any, *args: Any) -> tuple[fx.Node, ...]:
    whole = b.call(target, *args)
    return tuple(b.call(operator.getitem, whole, i) for i in range(count))
