"""One axis through a graph: which axis of a node's operands an axis of the node comes from.

Keys and values may be computed from the cache in many ways, head repetition, casts, de-quantisation, norms, or an
up-projection of latents. All are the same computation at every position: what is at position p of the result depends on
position p of the operands alone. `step` says so of one node, or why not; matching asks it on the way up to the cache,
and `commute_gather` computes the same again for a few positions. Analysis only.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.dataflow import DataFlow, mutated_argument
from sfi_compile.passes.products import TURNS, order_of, spelled_out
from sfi_compile.passes.shapes import CAT, SAME, counted_from, every_axis, is_pointwise, name_of, shape_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A graph input: the axis is its own."""

    source: fx.Node
    axis: int


@dataclasses.dataclass(frozen=True)
class Same:
    """The same elements, and the same axes in the same places."""

    source: fx.Node


@dataclasses.dataclass(frozen=True)
class Apply:
    """A function of its operands, position by position. Operands that are not listed lack the axis."""

    axes: dict[fx.Node, int]


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A new tensor that is filled in place: (write, what is written, axis of that), in program order."""

    writes: tuple[tuple[fx.Node, fx.Node, int], ...]


@dataclasses.dataclass(frozen=True)
class Count:
    """start + step * position."""

    start: int
    step: int


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Positions do not keep to themselves here."""

    reason: str
    grows: bool = False
    """The axis is an input's, made longer by a concatenation."""


Step = Leaf | Same | Apply | Assembled | Count | Blocked

VIEWS = frozenset(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"])
EXPANSIONS = frozenset(["expand", "expand_as", "broadcast_to"])
_FRESH = frozenset(["new_empty", "empty", "new_zeros", "zeros", "empty_like", "zeros_like"])
_REDUCTIONS = frozenset("mean sum amax amin var std norm vector_norm softmax log_softmax normalize prod".split())
_SPLITS = frozenset(["split", "chunk", "unbind", "tensor_split", "split_with_sizes"])


def step(node: fx.Node, axis: int, flow: DataFlow) -> Step:
    """Where axis `axis` (not negative) of `node` comes from. Of a node with several results, that of each of them."""
    if node.op in ("placeholder", "get_attr"):
        return Leaf(node, axis)
    written = mutated_argument(node)
    if written is not None:
        same = flow.origin(written).op == "placeholder" and shape_of(written) == shape_of(node)
        return Same(written) if same else Blocked(f"{node.name} writes in place")
    name = name_of(node)
    if node.target is torch.arange:
        return _count(node)
    if name in _FRESH:
        return _assembled(node, axis, flow)
    if node.target is operator.getitem:
        return _item(node, axis)
    if name in SAME:
        return Same(node.args[0]) if isinstance(node.args[0], fx.Node) else Blocked(f"{name} of no node")
    if is_pointwise(node):
        return _pointwise(node, axis)
    rule = _RULES.get(name)
    found = None if rule is None else rule(node, axis)
    if isinstance(found, Blocked) and found.grows and any(flow.writes(n) for n in node.all_input_nodes):
        return Blocked(found.reason)  # something beside a cache that was there before
    return Blocked(f"{name} is not pointwise along the sequence axis") if found is None else found


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _source(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    first: Any = node.args[0] if node.args else node.kwargs.get("input")
    shape = shape_of(first) if isinstance(first, fx.Node) else None
    return None if shape is None else (first, shape)


def _axes(value: Any, rank: int) -> list[int]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v % rank for v in values if isinstance(v, int)]


def _count(node: fx.Node) -> Step:
    found = counted_from(node)
    return Blocked(f"{node.name} is an arange with symbolic bounds") if found is None else Count(*found)


def _pointwise(node: fx.Node, axis: int) -> Step:
    shape = shape_of(node)
    if shape is None:
        return Blocked(f"{node.name} is no tensor")
    return _broadcast(node.all_input_nodes, axis - len(shape), shape[axis])


def _broadcast(operands: Iterable[fx.Node], from_right: int, size: int) -> Step:
    """Operands that broadcast; those of size one (or too few axes) lack the axis."""
    axes: dict[fx.Node, int] = {}
    for operand in operands:
        own = shape_of(operand)
        if own is not None and len(own) >= -from_right and own[from_right] == size:
            axes[operand] = len(own) + from_right
    return Apply(axes)


def _assembled(node: fx.Node, axis: int, flow: DataFlow) -> Step:
    """`new_empty` and sliced copies into it. The slices may not cut the axis."""
    writes: list[tuple[fx.Node, fx.Node, int]] = []
    for write in flow.writes(node):
        target: Any = write.args[0]
        value, index = write.args[-1], None
        if write.target is operator.setitem:
            index = write.args[1]
        elif write.target == "copy_" and isinstance(target, fx.Node) and target.target is operator.getitem:
            target, index = target.args
        if target is not node or not isinstance(value, fx.Node) or index is None:
            return Blocked(f"{write.name} writes into {node.name}")
        if node in flow.slice_of(value):
            return Blocked(f"{write.name} writes what {node.name} holds already")
        whole, shape = shape_of(node) or (), shape_of(value)
        found = _place(index, axis, whole)
        if found is None or shape is None:
            return Blocked(f"{write.name} writes into a part of {node.name}")
        place = found[0] + len(shape) - found[1]  # what is written broadcasts, aligned to the right
        if not 0 <= place < len(shape) or shape[place] != whole[axis]:
            return Blocked(f"{write.name} writes into a part of {node.name}")
        writes.append((write, value, place))
    return Assembled(tuple(writes))


def _place(index: Any, axis: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Which axis of `x[index]` is axis `axis` of x, of that shape, and how many `x[index]` has.

    None if the index cuts or moves the axis.
    """
    source, place, out = 0, None, 0
    for item in every_axis(index, len(shape)):
        if item is not None and source == axis:
            whole = isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)
            end = item.stop if whole else None
            if not whole or not (end is None or (isinstance(end, int) and end >= shape[axis])):
                return None
            place = out
        elif not (item is None or isinstance(item, (slice, int))):
            return None
        out += not isinstance(item, int)
        source += item is not None
    return None if place is None else (place, out)


def _item(node: fx.Node, axis: int) -> Step:
    source, index = node.args
    if not isinstance(source, fx.Node):
        return Blocked(f"{node.name} takes an item of no node")
    shape = shape_of(source)
    if shape is None:  # one of several results
        if name_of(source) not in _SPLITS or not isinstance(index, int):
            return Blocked(f"{node.name} takes an item of {name_of(source)}")
        return Apply({source: axis})
    items = index if isinstance(index, tuple) else (index,)
    tensors = [i for i in items if isinstance(i, fx.Node)]
    if len(items) == 1 and len(tensors) == 1:  # rows of a table
        own = shape_of(tensors[0])
        if own is None or example(tensors[0]).dtype == torch.bool or axis >= len(own):
            return Blocked(f"{node.name} looks up {index}")
        return Apply({tensors[0]: axis})
    for candidate in range(len(shape)):
        found = _place(index, candidate, shape)
        if found is not None and found[0] == axis:
            return Apply({source: candidate})
    return Blocked(f"{node.name} slices {index} of {shape}")


def _view(node: fx.Node, axis: int) -> Step | None:
    found, shape = _source(node), shape_of(node)
    if found is None or shape is None:
        return None
    source, was = found
    if example(node).dtype != example(source).dtype:
        return Blocked("view reads the bits as another dtype")
    before = math.prod(shape[:axis])
    for candidate, size in enumerate(was):
        if size == shape[axis] and math.prod(was[:candidate]) == before:
            return Apply({source: candidate})
    return Blocked(f"{name_of(node)} from {was} to {shape} merges or splits the sequence axis")


def _permuted(node: fx.Node, axis: int) -> Step | None:
    found = _source(node)
    order = order_of(node)
    return None if found is None or order is None else Apply({found[0]: order[axis]})


def _expand(node: fx.Node, axis: int) -> Step | None:
    found, shape = _source(node), shape_of(node)
    if found is None or shape is None:
        return None
    source, was = found
    own = axis - (len(shape) - len(was))
    return Apply({source: own}) if own >= 0 and was[own] == shape[axis] else Apply({})


def _unmoved(node: fx.Node, axis: int) -> Step | None:
    """Ops that repeat, cut or stack along axes other than this one."""
    found, shape = _source(node), shape_of(node)
    if found is None or shape is None:
        return None
    source, was = found
    if name_of(node) == "repeat_interleave" and _argument(node, 2, "dim") is None:
        return None
    if name_of(node) == "narrow" and _argument(node, 1, "dim", 0) % len(was) == axis:
        return Blocked("narrow cuts the sequence axis")
    own = axis - (len(shape) - len(was))
    return Apply({source: own}) if own >= 0 and was[own] == shape[axis] else None


def _reduction(node: fx.Node, axis: int) -> Step | None:
    """Sums and the like over other axes."""
    found = _source(node)
    if found is None:
        return None
    source, was = found
    second = name_of(node) in ("norm", "normalize", "vector_norm")  # after the order of the norm
    dims = _argument(node, 2 if second else 1, "dim", 1 if name_of(node) == "normalize" else None)
    over = _axes(dims, len(was)) if dims is not None else list(range(len(was)))
    kept = len(shape_of(node) or ()) == len(was)
    rest = list(range(len(was))) if kept else [a for a in range(len(was)) if a not in over]
    own = rest[axis] if axis < len(rest) else None
    return None if own is None or own in over else Apply({source: own})


def _norm(node: fx.Node, axis: int) -> Step | None:
    """`layer_norm`, `rms_norm`: over the last axes, with weights that lack this one."""
    found = _source(node)
    normal = _argument(node, 1, "normalized_shape", ())
    normal = normal if isinstance(normal, (tuple, list)) else (normal,)
    return Apply({found[0]: axis}) if found and axis < len(found[1]) - len(normal) else None


def _linear(node: fx.Node, axis: int) -> Step | None:
    found = _source(node)
    return Apply({found[0]: axis}) if found and axis < len(found[1]) - 1 else None


def _matmul(node: fx.Node, axis: int) -> Step | None:
    shape = shape_of(node)
    operands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
    shapes = [shape_of(a) for a in operands]
    if shape is None or len(shapes) != 2 or any(s is None or len(s) < 2 for s in shapes) or operands[0] is operands[1]:
        return None
    if axis == len(shape) - 2:
        return Apply({operands[0]: len(shapes[0] or ()) - 2})
    if axis == len(shape) - 1:
        return Apply({operands[1]: len(shapes[1] or ()) - 1})
    return _broadcast(operands, axis - len(shape), shape[axis])


def _einsum(node: fx.Node, axis: int) -> Step | None:
    equation, operands = node.args[0], node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(set(operands)) != len(operands):
        return None
    *terms, out = spelled_out(equation, [len(shape_of(o) or ()) if isinstance(o, fx.Node) else 0 for o in operands])
    if len(terms) != len(operands) or any(len(set(term)) < len(term) for term in terms):
        return None
    letter, size = out[axis], (shape_of(node) or ())[axis]
    axes = {o: term.index(letter) for o, term in zip(operands, terms, strict=True) if letter in term}
    return Apply({o: a for o, a in axes.items() if isinstance(o, fx.Node) and (shape_of(o) or ())[a] == size})


def _cat(node: fx.Node, axis: int) -> Step | None:
    parts = _argument(node, 0, "tensors")
    shape = shape_of(node)
    if not isinstance(parts, (tuple, list)) or shape is None or len(set(parts)) != len(parts):
        return None
    parts = [p for p in parts if math.prod(shape_of(p) or (1,))]  # a cache that was empty until now
    along = _argument(node, 1, "dim", 0) % len(shape)
    if along == axis and len(parts) > 1:
        grows = any(part.op == "placeholder" for part in parts)
        return Blocked(f"{name_of(node)} appends to the sequence axis", grows=grows)
    own = axis - (name_of(node) == "stack" and axis > along)
    return Apply(dict.fromkeys(parts, own))


def _embedding(node: fx.Node, axis: int) -> Step | None:
    indices = _argument(node, 0, "input")
    shape = shape_of(indices) if isinstance(indices, fx.Node) else None
    return Apply({indices: axis}) if shape is not None and axis < len(shape) else None


def _split(node: fx.Node, axis: int) -> Step | None:
    found = _source(node)
    if found is None:
        return None
    source, was = found
    unbinds = name_of(node) == "unbind"
    along = _argument(node, 1 if unbinds else 2, "dim", 0) % len(was)
    own = axis + (unbinds and along <= axis)
    return Blocked(f"{name_of(node)} cuts the sequence axis") if own == along else Apply({source: own})


_RULES: dict[str, Callable[[fx.Node, int], Step | None]] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "permute", "getattr", *TURNS], _permuted),
    **dict.fromkeys(EXPANSIONS, _expand),
    **dict.fromkeys(["repeat", "repeat_interleave", "narrow"], _unmoved),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
    "linear": _linear,
    **dict.fromkeys(["matmul", "bmm", "mm", "__matmul__"], _matmul),
    "einsum": _einsum,
    **dict.fromkeys([*CAT, "stack"], _cat),
    "embedding": _embedding,
    **dict.fromkeys(_SPLITS, _split),
}
