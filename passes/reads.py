"""What attention reads: the cache write behind keys and values, and a mask that can be evaluated at single positions.

Raises `Refusal` where a site must stay dense. Analysis only, for `match_attention`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes import axes
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.site import CacheWrite

STATIC_HINT = 'use a preallocated cache: StaticCache, or generate(cache_implementation="static")'
MOST_POSITION_NODES = 64
"""A position that takes more nodes than this to compute is not a position."""


@dataclasses.dataclass(frozen=True)
class Refusal(Exception):
    """Carries a rejection's parts to the one place that records it."""

    code: str
    explanation: str
    hint: str


def cache_write(node: fx.Node, what: str, attention: fx.Node, flow: DataFlow) -> tuple[CacheWrite, tuple[fx.Node, ...]]:
    """The cache write behind keys or values, and the inputs from which they are computed beside the cache."""
    found = axes.trace(node, axes.named("bhsd", axes.shape_of(node) or ()))
    if found.blocked is not None:
        raise Refusal("not-commutable", f"{what}: {found.blocked.reason}", STATIC_HINT)
    if len(found.leaves) != 1 or found.leaves[0].rows is not None:
        raise Refusal("several-roots", f"{what} come from {len(found.leaves)} cached inputs", "cache one tensor")
    leaf = found.leaves[0]
    writes = flow.writes(leaf.source)
    if not writes:
        hint = "cross-attention stays dense" if leaf.source.op == "placeholder" else STATIC_HINT
        raise Refusal("no-cache-write", f"this step writes nothing into {leaf.source.name} ({what})", hint)
    if len(writes) > 1:
        raise Refusal("several-writes", f"{len(writes)} writes into {leaf.source.name} ({what})", STATIC_HINT)
    write = writes[0]
    if flow.order[write] > flow.order[attention]:
        raise Refusal("late-write", f"{write.name} comes after attention", "write the cache before attention")
    if any(flow.order[n] < flow.order[write] for n in found.computed):
        raise Refusal("stale-read", f"{what} are computed before {write.name}", "read the cache after writing it")
    other = _disturbing_write(found, attention, flow)
    if other is not None:
        raise Refusal("stale-read", f"{other.name} changes what {what} are computed from", "write the cache alone")
    axis = leaf.layout.index("s")
    index, value = _index_and_value(write, leaf.source, axis, what)
    if axes.shape_of(index) != (1,):
        raise Refusal("cache-write", f"{write.name} writes positions {axes.shape_of(index)}", "write one position")
    # Both are read again at the attention node, and the position also before the step.
    for source, since, code in ((index, index, "position"), (value, write, "stale-read")):
        for other in flow.writes(source):
            if flow.order[since] < flow.order[other] < flow.order[attention]:
                raise Refusal(code, f"{other.name} changes {source.name} in place", "update it after attention")
    return CacheWrite(write, leaf.source, leaf.layout, index, value), _constants(found, index, what, flow)


def _constants(found: axes.Trace, position: fx.Node, what: str, flow: DataFlow) -> tuple[fx.Node, ...]:
    """The inputs from which keys or values are computed beside the cache.

    A memory keeps what was computed when it was packed, so these must not change with the step. Whether their owner
    changes them between steps is for the runtime to watch.
    """
    changing = {n for n in flow.slice_of(position) if n.op == "placeholder"}
    inputs: dict[fx.Node, None] = {}
    for operand in found.fixed:
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
    return tuple(inputs)


def _is_index(node: fx.Node) -> bool:
    """Token ids, positions, lengths: what a step is fed."""
    return example(node).dtype in (torch.int64, torch.int32)


def _index_and_value(write: fx.Node, root: fx.Node, axis: int, what: str) -> tuple[fx.Node, fx.Node]:
    refused = Refusal("cache-write", f"{what} are written by {write.format_node()}", "use index_copy_ or setitem")
    shape = axes.shape_of(root) or ()
    if write.args[0] is not root:
        raise refused
    index: Any
    value: Any
    if write.target == "index_copy_" and len(write.args) == 4:
        _, dim, index, value = write.args
        if not isinstance(dim, int) or dim % len(shape) != axis:
            raise refused
    elif write.target is operator.setitem:
        items = write.args[1] if isinstance(write.args[1], tuple) else (write.args[1],)
        if len(items) <= axis or any(item != slice(None) for i, item in enumerate(items) if i != axis):
            raise refused
        index, value = items[axis], write.args[2]
    else:
        raise refused
    if not isinstance(index, fx.Node) or not isinstance(value, fx.Node):
        raise refused
    expected = tuple(1 if i == axis else n for i, n in enumerate(shape))
    if axes.shape_of(value) != expected:
        raise refused
    return index, value


def check_position(write: CacheWrite, flow: DataFlow) -> None:
    """Refuse a position that the runtime could not compute before the step."""
    needed = flow.slice_of(write.index)
    if example(write.index).dtype not in (torch.int64, torch.int32):
        raise Refusal("position", f"positions are {example(write.index).dtype}", "index with int64")
    if len(needed) > MOST_POSITION_NODES:
        raise Refusal("position", f"the position takes {len(needed)} nodes to compute", "pass it to the model")


def checked_mask(
    mask: Any, full: tuple[int, int, int, int], attention: fx.Node, flow: DataFlow
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The mask of a site over `full` = [batch, query heads, queries, context], and where its context axis enters."""
    if not isinstance(mask, fx.Node):
        raise Refusal("no-mask", "no mask tells which cached tokens are valid", "pass an attention mask")
    shape = axes.shape_of(mask)
    if shape is None or len(shape) != 4 or any(m not in (1, f) for m, f in zip(shape, full, strict=True)):
        raise Refusal("mask-shape", f"mask {shape} over {full}", "use a mask [batch, heads or 1, 1, context]")
    if shape[3] != full[3]:
        raise Refusal("mask-shape", f"mask {shape} says nothing about single tokens", "use a mask over the context")
    if shape[1] != 1:
        raise Refusal("mask-heads", f"mask {shape} differs between heads", "use one mask for all heads")
    found = axes.trace(mask, axes.named("bhqs", shape))
    if found.blocked is not None:
        hint = "pass a 4-D mask, or a 2-D mask as long as the cache"
        raise Refusal("mask-not-commutable", f"mask: {found.blocked.reason}", hint)
    write = _disturbing_write(found, attention, flow)
    if write is not None:
        hint = "build the mask anew, after everything that it reads was updated"
        raise Refusal("mask-written", f"{write.name} changes the mask, or what it reads, in place", hint)
    return mask, found.sources


def _disturbing_write(found: axes.Trace, attention: fx.Node, flow: DataFlow) -> fx.Node | None:
    """A write in place that makes a value differ from what is computed anew, at the attention node, from its leaves."""
    for operand, reader in found.reads:
        for write in flow.writes(operand):
            if flow.order[reader] < flow.order[write] < flow.order[attention]:
                return write
    inner = [n for n in (*found.computed, *found.sources) if flow.origin(n).op not in ("placeholder", "get_attr")]
    return next((w for n in inner for w in flow.writes(n) if flow.order[w] < flow.order[attention]), None)
