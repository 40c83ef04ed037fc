"""lower: `sfi::` operators → what the device runs.

The fast path's operators become plain aten, traced from their bodies in `sfi_compile.ops`, so that Inductor compiles
and fuses them with the model. The slow path's stay operators on a CPU: they work row by row on the rows that are slow,
which a graph of static shapes cannot say. On a GPU they become those of `sfi_compile.ops.device`, which ask the host
for nothing, and attention over the memory stays an operator for which Inductor has a template (`kernels/lowering.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from sfi_compile import ops, policies
from sfi_compile.compat.dynamo import example, fake_mode_of, module_path
from sfi_compile.kernels import attended_cuda, lowering
from sfi_compile.ops import device
from sfi_compile.ops.slow import parse_spec
from sfi_compile.passes import counters, linears, shared_values
from sfi_compile.passes.base import Pass, VerificationError, Work
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import constant_of, description
from sfi_compile.site import Rejection

log = logging.getLogger("sfi_compile")

_SFI = torch.ops.sfi
_PLAIN: dict[Any, Any] = {getattr(_SFI, name).default: body for name, body in ops.plain.items()}
_TEMPLATE = _SFI.memory_attention.default
_DEFAULTS = (0.0, None)
"""Softcap and sinks of `sfi::memory_attention`, which come before its length."""
SCRATCH = 0.035
"""Share of the KV cache that may be taken by what several sites select from, and by the selector beside it."""
MOST_PROGRAMS = 2**16 - 1
"""Along the axis of a grid that counts sites times rows."""
SELECTOR_COLUMNS = 4
"""Numbers of 4 bytes for each position and KV head, beside the logits: log-norms and the selector's three arrays."""


@dataclasses.dataclass(frozen=True)
class Lower(Pass):
    """Changes the slow and the fast graph in place: they are this pipeline's own, and nothing reads them before."""

    name: ClassVar[str] = "lower"
    kernels: bool | None = None
    """Whether to use the Triton kernels. None: where the device has them."""

    def apply(self, work: Work) -> Work:
        """The work with both graphs lowered."""
        kernels = self.kernels
        if kernels is None:
            reason = _without_kernels(work)
            on_gpu = any(s.device.type != "cpu" for s in work.state)
            kernels = reason is None and on_gpu
            if reason is not None and on_gpu:  # on a CPU, nobody expects any
                log.warning("sfi: plain torch instead of kernels: %s", reason)
        bodies = {target: body for target, body in _PLAIN.items() if not kernels or target is not _TEMPLATE}
        if kernels:
            lowering.register()
            bodies[_SFI.frame.default] = device.frame
        tracer = Tracer()
        for module in work.variants:
            if kernels:
                _on_device(module.graph, tracer)
                linears.combine(module.graph)
                counters.combine(module.graph)
                shared_values.keep(module.graph)
            for node in [n for n in module.graph.nodes if n.target in bodies]:
                if node.kwargs:
                    raise VerificationError(f"{node.format_node()}: positional arguments only")
                with module.graph.inserting_before(node):
                    result = tracer.inline(module.graph, bodies[node.target], node.args)
                _replace(node, result)
            module.graph.lint()
            module.recompile()
        return work


def _without_kernels(work: Work) -> Rejection | None:
    """Why the device cannot run our kernels on some site; None: it can on all."""
    for node in work.variants[0].graph.nodes:
        if node.target is not _SFI.select.default:
            continue
        policy = policies.parse(parse_spec(node.args[6]).policy)
        attended = policies.attended_of(policy)
        if policy.name != "sfi" and (attended is None or attended.ahead > attended_cuda.MOST_AHEAD):
            found, hint = f"policy {policy.to_text()!r}, which is no kernel", "policy='reach', 'sfi', 'h2o' or 'topk'"
            return Rejection("kernel-policy", "graph", found, hint)
        if len(node.args) > 7:
            found, hint = "queries of earlier tokens, which no kernel reads", "evidence_window=1"
            return Rejection("kernel-window", "graph", found, hint)
    for node in work.variants[1].graph.nodes:
        reason = lowering.supports(*(example(n) for n in node.args[:3])) if node.target is _TEMPLATE else None
        if reason is not None:
            return dataclasses.replace(reason, where=module_path(node))
    for node in work.variants[0].graph.nodes:
        fill = _fill(node) if node.target is _SFI.dense_attention.default else None
        if fill is not None and constant_of(fill) is None:
            explanation = f"blocked logits become {fill.name}, which is no number"
            return Rejection("kernel-fill", module_path(node), explanation, "mask with False, or with one number")
    return None


def _by_value(select: fx.Node) -> bool:
    """Whether a selection looks at the values, of which kernels then know the norms."""
    attended = policies.attended_of(policies.parse(parse_spec(select.args[6]).policy))  # type: ignore[arg-type]
    return attended is not None and attended.by_value


def _fill(dense: fx.Node) -> fx.Node | None:
    """What blocked logits become in `sfi::dense_attention`; None: they have no weight."""
    fill = dense.args[11] if len(dense.args) > 11 else None
    return fill if isinstance(fill, fx.Node) else None


def _on_device(graph: fx.Graph, tracer: Tracer) -> None:
    """Replace the slow path's operators by those that work on all rows without asking the host, and tell attention over
    the memory how far each row's is filled."""
    nodes = list(graph.nodes)
    by_products: dict[fx.Node, tuple[fx.Node, ...]] = {}
    appends: dict[Any, tuple[Any, ...]] = {}
    still: dict[fx.Node, fx.Node] = {}
    lengths: dict[Any, fx.Node] = {}
    settled: set[Any] = set()
    unsettled: dict[fx.Node, _Unsettled] = {}
    packs: dict[Any, fx.Node] = {n.args[8]: n for n in nodes if n.target is _SFI.pack.default}
    by_value = any(_by_value(n) for n in nodes if n.target is _SFI.select.default)
    accumulates = {n.args[6]: n for n in nodes if n.target is _SFI.accumulate.default}
    slow_rows = next((n.args[4] for n in nodes if n.target is _SFI.dense_attention.default), None)
    for node in nodes:
        arguments: tuple[Any, ...] = node.args
        with graph.inserting_before(node):
            if node.target is _SFI.append.default:
                appends[arguments[7]] = arguments
                if arguments[7] in packs:
                    _append(graph, node, packs[arguments[7]].args, still)
            elif node.target is _TEMPLATE:
                position, refreshed_at, selected_end, recent, held = appends[arguments[1]][2:7]
                slots = int(example(held).shape[-1])
                filled = (position, refreshed_at, slow_rows, selected_end, recent, slots)
                if filled not in lengths:
                    lengths[filled] = tracer.inline(graph, device.filled, filled)
                node.args = (*arguments, *_DEFAULTS[len(arguments) - 6 :], lengths[filled])
            elif node.target is _SFI.dense_attention.default:
                *attended, scale, status, context = arguments[:9]
                fill = _fill(node)
                number = None if fill is None else constant_of(fill)
                form = (*arguments[9:11], *_DEFAULTS[len(arguments[9:11]) :], number, by_value)
                out, *found = _parts(graph, 4, _SFI.dense_decode.default, *attended, scale, *form)
                unsettled[found[0]] = _Unsettled(found[1], attended[4], attended[5], status)
                # Once for all layers of one mask: again, it changes nothing.
                if (found_in := (_part(attended[5]), context)) not in settled:
                    tracer.inline(graph, device.settle_context, (*attended[4:], context))
                    settled.add(found_in)
                _replace(node, (out, found[0]))
                by_products[found[0]] = tuple(found)
            elif node.target is _SFI.pack.default and arguments[8] not in appends:
                # One row: it is slow. Where it would be appended is not looked at.
                k, v, _, _, rows, status, _, *memory = arguments
                _call(graph, _SFI.append_rows.default, k, v, rows, status, status, -1, *memory)
    for several in _together(list(packs.values()), DataFlow(graph)):
        found_by = [unsettled.pop(pack.args[2].args[0]) for pack in several]  # type: ignore[union-attr, arg-type]
        with graph.inserting_before(several[-1]):
            _settle(graph, tracer, found_by)
        _refresh(graph, several, by_products, accumulates)
    for alike in _grouped(unsettled.values()):
        with graph.inserting_before(alike[-1].lse.next):
            _settle(graph, tracer, alike)


@dataclasses.dataclass(frozen=True)
class _Unsettled:
    """A site of whose dense attention nobody has looked yet whether it went well."""

    lse: fx.Node
    slow_rows: fx.Node
    extent: fx.Node
    status: fx.Node

    @property
    def kind(self) -> Hashable:
        """Equal for sites that can be looked at together."""
        return description(self.lse), self.slow_rows, _part(self.extent), self.status


def _grouped(sites: Iterable[_Unsettled]) -> list[list[_Unsettled]]:
    groups: dict[Hashable, list[_Unsettled]] = {}
    for site in sites:
        groups.setdefault(site.kind, []).append(site)
    return list(groups.values())


def _settle(graph: fx.Graph, tracer: Tracer, sites: list[_Unsettled]) -> None:
    """Write what some sites of one kind found into their rows' status, all at once, at the insertion point."""
    last = sites[-1]
    tracer.inline(graph, device.settle, (last.slow_rows, last.extent, last.status, *(site.lse for site in sites)))


def _append(graph: fx.Graph, append: fx.Node, packed: Any, still: dict[fx.Node, fx.Node]) -> None:
    """Replace `sfi::append` in a slow step by an operator that takes this step's tokens out of the cache."""
    arguments: tuple[Any, ...] = append.args
    position, refreshed_at, selected_end, recent, *memory = arguments[2:]
    if position not in still:
        with graph.inserting_after(position):
            still[position] = _call(graph, _SFI.still.default, position)
    when = (still[position], refreshed_at, selected_end + recent - 1)
    _call(graph, _SFI.append_rows.default, *packed[:2], packed[4], *when, *memory)
    graph.erase_node(append)


def _together(packs: list[fx.Node], flow: DataFlow) -> list[list[fx.Node]]:
    """Sites whose memories are made at once, in program order: alike, under the same mask, and not too many."""
    groups: dict[Any, list[fx.Node]] = {}
    cached = 0
    for pack in packs:
        arguments: tuple[Any, ...] = pack.args
        k, v, select, frame, slow_rows, status, sink, *memory = arguments
        own = tuple(description(n) for n in (k, v, select.args[0], *memory))
        shared = tuple(_part(n) for n in (frame, *select.args[4:6]))
        # What is computed from the cache would have to be kept until all of its group is there.
        computed = any(flow.origin(n).op != "placeholder" for n in (k, v))
        alone = pack if computed else None
        groups.setdefault((*shared, slow_rows, status, sink, select.args[6], own, alone), []).append(pack)
        cached += 0 if computed else sum(example(n).nbytes for n in (k, v))
    found = []
    for group in groups.values():
        logits = example(group[0].args[2].args[0])  # type: ignore[union-attr, arg-type]
        batch, heads, rows, size = logits.shape
        most = int(SCRATCH * cached / (4 * batch * heads * size * (rows + SELECTOR_COLUMNS)))
        most = max(min(most, MOST_PROGRAMS // batch), 1)
        parts = math.ceil(len(group) / most)
        each = math.ceil(len(group) / parts)
        found += [group[i : i + each] for i in range(0, len(group), each)]
    return found


def _part(node: fx.Node) -> Any:
    """What is the same for two nodes that stand for the same part of an operator's results."""
    return node.args if node.target is operator.getitem else node


def _refresh(
    graph: fx.Graph,
    packs: list[fx.Node],
    by_products: dict[fx.Node, tuple[fx.Node, ...]],
    accumulates: dict[Any, fx.Node],
) -> None:
    """Replace `sfi::pack`, `sfi::select` and `sfi::accumulate` of some sites by one operator, where the last was."""
    arguments: list[tuple[Any, ...]] = [pack.args for pack in packs]
    evidence = [by_products[a[2].args[0]] for a in arguments]
    _, _, select, frame, slow_rows, status, sink = arguments[-1][:7]
    extent, log_position, spec = select.args[4:]
    kept = [accumulates[a[2].kwargs["history"]] for a in arguments if "history" in a[2].kwargs]
    since = kept[-1].args[4] if kept else status
    position = extent.args[0].args[2]  # of `sfi::frame`
    lists = [list(x) for x in zip(*(e + a[:2] for e, a in zip(evidence, arguments, strict=True)), strict=True)]
    memory = [list(x) for x in zip(*(a[7:] for a in arguments), strict=True)]
    with graph.inserting_before(packs[-1]):
        shared = (frame, slow_rows, status, extent, position, since, log_position)
        operands = (*lists, [n.args[6] for n in kept], *memory, *shared)
        _call(graph, _SFI.refresh_rows.default, *operands, spec, sink)
    for pack, given in zip(packs, arguments, strict=True):
        graph.erase_node(pack)
        graph.erase_node(given[2])
    for node in kept:
        graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    mode = fake_mode_of(graph)
    if mode is None:
        raise VerificationError("a graph without fake values cannot be lowered")
    node = graph.call_function(target, args)
    with mode, torch.no_grad():
        node.meta["example_value"] = target(*fx.map_arg(args, example))
    return node


def _parts(graph: fx.Graph, count: int, target: Any, *args: Any) -> tuple[fx.Node, ...]:
    whole = _call(graph, target, *args)
    return tuple(_call(graph, operator.getitem, whole, i) for i in range(count))


def _replace(node: fx.Node, result: Any) -> None:
    """Put a node, or one node for each of its parts, in the place of `node`."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    elif result is not None:
        for part in list(node.users):
            if part.target is not operator.getitem:
                raise VerificationError(f"{part.name} uses all results of {node.name} at once")
            part.replace_all_uses_with(result[part.args[1]])
            node.graph.erase_node(part)
    node.graph.erase_node(node)


class Tracer:
    """Writes the aten graph of a function into another graph. Sites of one model mostly look alike: each kind is
    traced once."""

    def __init__(self) -> None:
        self.traces: dict[Hashable, fx.Graph] = {}

    def inline(self, graph: fx.Graph, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Insert what `body(*args)` does at the graph's insertion point; the nodes of its results."""
        kind = body, tuple(description(a) if isinstance(a, fx.Node) else repr(a) for a in args)
        if kind not in self.traces:
            self.traces[kind] = _trace(graph, body, args)
        trace = self.traces[kind]
        inputs = [n for n in trace.nodes if n.op == "placeholder"]
        mapping: dict[fx.Node, Any] = dict(zip(inputs, (a for a in args if isinstance(a, fx.Node)), strict=True))
        for inner in trace.nodes:
            if inner.op == "output":
                return fx.map_arg(inner.args[0], mapping.__getitem__)
            if inner.op != "placeholder":
                mapping[inner] = graph.node_copy(inner, mapping.__getitem__)
                mapping[inner].meta["example_value"] = inner.meta.get("val")
        raise VerificationError(f"the trace of {body.__name__} has no output")


def _trace(graph: fx.Graph, body: Callable[..., Any], args: tuple[Any, ...]) -> fx.Graph:
    """The aten graph of a function, for its arguments' fake values."""
    mode = fake_mode_of(graph)
    if mode is None:
        raise VerificationError(f"{body.__name__}: a graph without fake values cannot be lowered")
    given = {i: a for i, a in enumerate(args) if isinstance(a, fx.Node)}

    def call(*values: torch.Tensor) -> Any:
        full: list[Any] = list(args)
        for i, value in zip(given, values, strict=True):
            full[i] = value
        return body(*full)

    with mode, torch.no_grad():
        # Fresh values: the tracer takes equal objects for one input, and another node's arguments may differ.
        values = []
        for argument in given.values():
            shape, stride, dtype, where = description(argument)
            values.append(torch.empty_strided(shape, stride, dtype=dtype, device=where))
        return make_fx(call)(*values).graph
