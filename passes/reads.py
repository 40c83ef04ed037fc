"""What attention reads: the cache writes behind keys and values, and a mask that can be evaluated at single positions.

Raises `Refusal` where a site must stay dense. Analysis only, for `match_attention`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes import along, axes, openings, paths
from sfi_compile.passes.base import Refusal
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import shape_of
from sfi_compile.passes.writes import position_and_value
from sfi_compile.site import CacheWrite

STATIC_HINT = 'use a preallocated cache: StaticCache, or generate(cache_implementation="static")'
MOST_POSITION_NODES = 64
"""A position that takes more nodes than this to compute is not a position."""


@dataclasses.dataclass(frozen=True)
class CacheRead:
    """Where keys or values come from."""

    writes: tuple[CacheWrite, ...]
    """One for every cache root."""
    constants: tuple[fx.Node, ...]
    """Graph inputs from which they are computed beside the cache."""
    sources: tuple[fx.Node, ...]
    """Where the sequence axis enters."""


def cache_read(node: fx.Node, what: str, attention: fx.Node, flow: DataFlow) -> CacheRead | None:
    """The cache behind keys or values [batch, heads, context, dim]; None if they are made in this step."""
    found = paths.path(node, 2, flow)
    if found.blocked is not None and found.blocked.grows:
        raise Refusal("growing-cache", f"{what}: {found.blocked.reason}", STATIC_HINT)
    if found.blocked is not None and not _reaches_input(node, flow):
        return None
    if found.blocked is not None:
        hint = "attend to the whole cache, under a mask" if "slices" in found.blocked.reason else STATIC_HINT
        raise Refusal("not-commutable", f"{what}: {found.blocked.reason}", hint)
    if not found.leaves:
        return None
    rows = paths.path(node, 0, flow)
    batch_axes = {leaf.source: leaf.axis for leaf in rows.leaves}
    writes: list[CacheWrite] = []
    constants: dict[fx.Node, None] = {}
    for leaf in found.leaves:
        size, length = (shape_of(node) or ())[2], (shape_of(leaf.source) or ())[leaf.axis]
        if length != size:
            raise Refusal("not-commutable", f"{what} of length {size} come from {length} positions", STATIC_HINT)
        if flow.writes(leaf.source):
            batch_axis = batch_axes.get(leaf.source)
            writes.append(_write(leaf, what, batch_axis if batch_axis != leaf.axis else None, attention, flow))
        elif leaf.source.op == "placeholder":
            constants[leaf.source] = None
    if not writes:
        names = ", ".join(leaf.source.name for leaf in found.leaves)
        hint = "nothing for cross-attention; else write into the cache in place" if constants else STATIC_HINT
        raise Refusal("no-cache-write", f"this step writes nothing into {names} ({what})", hint)
    if len({w.count for w in writes}) > 1:
        raise Refusal("cache-write", f"{what}: the caches are written at unequal numbers of positions", "write alike")
    for write in writes:
        early = (n for n in found.computed if flow.order[n] < flow.order[write.node] and write.root in flow.slice_of(n))
        if next(early, None) is not None:
            raise Refusal("stale-read", f"{what} are computed before {write.node.name}", "read the cache after writing")
    late = (w for w in found.filling if flow.order[w] > flow.order[attention])
    other = _disturbing_write(found, attention, flow) or next(late, None)
    if other is not None:
        raise Refusal("stale-read", f"{other.name} changes what {what} are computed from", "write the cache alone")
    constants |= dict.fromkeys(_constants(found.fixed, writes, what, flow))
    return CacheRead(tuple(writes), tuple(constants), found.sources)


def _reaches_input(node: fx.Node, flow: DataFlow) -> bool:
    """Whether a value depends on anything that may be a cache: an input of four axes, or one that is written."""
    needed = {n for one in (node, *flow.writes(node)) for n in flow.slice_of(one)}
    inputs = [n for n in needed if n.op == "placeholder"]
    return any(len(shape_of(n) or ()) >= (3 if flow.writes(n) else 4) for n in inputs)


def _write(leaf: along.Leaf, what: str, batch_axis: int | None, attention: fx.Node, flow: DataFlow) -> CacheWrite:
    writes = flow.writes(leaf.source)
    if leaf.source.op != "placeholder":
        raise Refusal("no-cache-write", f"{what} come from {leaf.source.name}, which is no input", STATIC_HINT)
    if len(writes) > 1:
        hint = "keys and values each in a tensor of its own, written once a step"
        raise Refusal("several-writes", f"{len(writes)} writes into {leaf.source.name} ({what})", hint)
    node = writes[0]
    if flow.order[node] > flow.order[attention]:
        raise Refusal("late-write", f"{node.name} comes after attention", "write the cache before attention")
    index, count, value, lacks_axis = position_and_value(node, leaf.source, leaf.axis, what)
    # Both are read again at the attention node, and the position also before the step.
    for source, since, code in ((index, index, "position"), (value, node, "stale-read")):
        for other in flow.writes(source) if isinstance(source, fx.Node) and isinstance(since, fx.Node) else ():
            if flow.order[since] < flow.order[other] < flow.order[attention]:
                raise Refusal(code, f"{other.name} changes {source} in place", "update it after attention")
    return CacheWrite(node, leaf.source, leaf.axis, batch_axis, index, count, value, lacks_axis)


def _constants(operands: Iterable[fx.Node], writes: list[CacheWrite], what: str, flow: DataFlow) -> dict[fx.Node, None]:
    """The inputs that other operands depend on.

    A memory keeps what was computed when it was packed, so these must not change with the step. Whether their owner
    changes them between steps is for the runtime to watch.
    """
    indices = [w.index for w in writes if isinstance(w.index, fx.Node)]
    changing = {n for index in indices for n in flow.slice_of(index) if n.op == "placeholder"}
    inputs: dict[fx.Node, None] = {}
    for operand in dict.fromkeys(operands):
        for needed in flow.slice_of(operand):
            is_input = needed.op == "placeholder"
            tensor = isinstance(example(needed), torch.Tensor)
            if flow.writes(needed) or (is_input and (needed in changing or not tensor or _is_index(needed))):
                raise Refusal(
                    "changing-operand",
                    f"{what} are computed from the cache and {operand.name}, which changes with {needed.name}",
                    "cache what attention reads, or scale the queries or the output instead",
                )
            if is_input:
                inputs[needed] = None
    return inputs


def _is_index(node: fx.Node) -> bool:
    """Token ids, positions, lengths: what a step is fed."""
    return example(node).dtype in (torch.int64, torch.int32)


def check_position(write: CacheWrite, flow: DataFlow) -> None:
    """Refuse a position that the runtime could not compute before the step."""
    if not isinstance(write.index, fx.Node):
        return
    value, needed = example(write.index), flow.slice_of(write.index)
    if isinstance(value, torch.Tensor) and value.dtype not in (torch.int64, torch.int32):
        raise Refusal("position", f"positions are {value.dtype}", "index with int64")
    if len(needed) > MOST_POSITION_NODES:
        raise Refusal("position", f"the position takes {len(needed)} nodes to compute", "pass it to the model")


def checked_mask(mask: fx.Node, full: tuple[int, ...], attention: fx.Node, flow: DataFlow) -> axes.Trace:
    """Where the context axis of a mask over `full` = [batch, query heads, queries, context] comes from."""
    shape = shape_of(mask)
    if shape is None or len(shape) != 4 or any(m not in (1, f) for m, f in zip(shape, full, strict=True)):
        raise Refusal("mask-shape", f"mask {shape} over {full}", "use a mask [batch, heads or 1, 1, context]")
    layout = axes.named("bhqs", shape)
    found = axes.trace(mask, layout, full[1])
    if found.blocked is not None:
        hint = "pass a 4-D mask, or a 2-D mask as long as the cache"
        raise Refusal("mask-not-commutable", f"mask: {found.blocked.reason}", hint)
    write = _disturbing_write(found, attention, flow)
    if write is not None:
        hint = "build the mask anew, after everything that it reads was updated"
        raise Refusal("mask-written", f"{write.name} changes the mask, or what it reads, in place", hint)
    opening = openings.opens(mask, layout, full[1], flow)
    if opening is not None:
        explanation = (
            f"{opening.name} compares tokens with the step's position other than by order, so the mask may let "
        )
        explanation += "through later what it blocks now"
        hint = "pass the mask to the model, if no token is let through that was blocked before"
        raise Refusal("mask-opens", explanation, hint)
    return found


def _disturbing_write(found: axes.Trace | paths.Path, attention: fx.Node, flow: DataFlow) -> fx.Node | None:
    """A write in place that makes a value differ from what is computed anew, at the attention node, from its leaves."""
    own = found.filling if isinstance(found, paths.Path) else frozenset()
    for operand, reader in found.reads:
        for write in flow.writes(operand):
            if flow.order[reader] < flow.order[write] < flow.order[attention]:
                return write
    inner = [n for n in (*found.computed, *found.sources) if flow.origin(n).op not in ("placeholder", "get_attr")]
    writes = (w for n in inner for w in flow.writes(n) if w not in own)
    return next((w for w in writes if flow.order[w] < flow.order[attention]), None)
