"""Named axes: how one step of a mask's computation looks from below.

A fast step needs the mask at other positions for every row and head, so a mask is traced upwards node by node with a
letter per axis: b(atch), h(ead), q(uery), s(equence), m for batch and head merged in this order; an axis of size one is
`1`. `step` says what a node is in these terms; if it is `Blocked`, a gather along s cannot be pushed through it.
Analysis only: matching asks whether the gather can be pushed to the roots, `commute_gather` then does it, both from
this one table.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.dataflow import mutated_argument
from sfi_compile.passes.shapes import SAME, counted_from, every_axis, is_pointwise, name_of, shape_of


@dataclasses.dataclass(frozen=True)
class View:
    """The same elements under another layout."""

    source: fx.Node
    layout: str


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """Element by element; `layouts` has an entry per node argument (`all_input_nodes` order)."""

    layouts: dict[fx.Node, str]


@dataclasses.dataclass(frozen=True)
class Arange:
    """start + step * s."""

    start: int
    step: int


@dataclasses.dataclass(frozen=True)
class Fill:
    """The same number everywhere."""

    value: float | int | bool


@dataclasses.dataclass(frozen=True)
class Table:
    """`f(source)[i, j, ...]` with an index per axis of `source`: a tensor that broadcasts to the node's layout, or the
    letter of an axis, which is looked up whole."""

    source: fx.Node
    """A graph input."""
    functions: tuple[fx.Node, ...]
    """Pointwise nodes with one operand between the source and the lookup, in program order."""
    indices: tuple[fx.Node | str, ...]
    layouts: dict[fx.Node, str]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A graph input (or something without a sequence axis): the gather ends here. `rows` picks entries of axis q."""

    source: fx.Node
    layout: str
    rows: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Kept:
    """A running count over an input [batch, context]: the one thing that stays as long as the context.

    It has neither heads nor features, and is made once a step.
    """

    layout: str
    nodes: tuple[fx.Node, ...]
    """The count, and the casts below it."""


@dataclasses.dataclass(frozen=True)
class Blocked:
    """No gather can be pushed through this node."""

    reason: str


Step = View | Pointwise | Arange | Fill | Table | Leaf | Kept | Blocked

_FILLS = {
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], 0),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], 1),
    **dict.fromkeys(["full", "full_like", "new_full"]),
}


def named(layout: str, shape: tuple[int, ...]) -> str:
    """The layout with `1` for every axis of size one except s."""
    return "".join(name if name == "s" or size != 1 else "1" for name, size in zip(layout, shape, strict=True))


def broadcast(layout: str, shape: tuple[int, ...]) -> str:
    """Layout of an operand of `shape` that broadcasts (right-aligned) to a result with `layout`."""
    tail = layout[len(layout) - len(shape) :]
    return "".join(name if size != 1 else "1" for name, size in zip(tail, shape, strict=True))


def step(node: fx.Node, layout: str, heads: int) -> Step:
    """What `node`, whose axes are named by `layout`, is one level up. `heads`: size of axis h."""
    shape = shape_of(node)
    if shape is None or len(shape) != len(layout):
        return Blocked(f"{node.name} is not a tensor with axes {layout!r}")
    if "s" not in layout or _is_view_of_input(node):
        return Leaf(node, layout)
    written = mutated_argument(node)
    if written is not None:
        return View(written, layout) if shape_of(written) == shape else Blocked(f"{node.name} writes in place")
    target, args = node.target, node.args
    source = args[0] if args and isinstance(args[0], fx.Node) else None
    if node.op == "call_function":
        if target is torch.arange:
            return _arange(node)
        if target is operator.getitem and source is not None:
            return _getitem(node, source, args[1], layout)
        if target is torch.nn.functional.embedding:
            return _embedding(node, layout)
    name = name_of(node)
    if name in _FILLS:
        filled = node.kwargs.get("fill_value", args[-1] if args else None) if _FILLS[name] is None else _FILLS[name]
        return Fill(filled) if isinstance(filled, (int, float, bool)) else Blocked(f"{node.name} fills with a tensor")
    if node.op == "call_method" and name in SAME and source is not None:
        return View(source, layout)
    if is_pointwise(node):
        return _pointwise(node, layout)
    if name == "cumsum":
        return _running(node, layout)
    if source is not None:
        moved = _moved(node, source, layout, heads)
        if moved is not None:
            return moved
    return Blocked(f"{name} is not pointwise along the sequence axis")


def _running(node: fx.Node, layout: str) -> Step:
    given = [*node.args[1:], *node.kwargs.values()]
    kept, source = [node], node.args[0] if node.args else None
    while isinstance(source, fx.Node) and name_of(source) in ("to", "long", "int", "float", "bool") and source.args:
        kept.append(source)
        source = source.args[0]
    along = next((g for g in given if isinstance(g, int) and not isinstance(g, bool)), None)
    shape = shape_of(node) or ()
    of_input = isinstance(source, fx.Node) and _is_view_of_input(source) and set(layout) <= set("b1s")
    if of_input and along is not None and layout[along % len(shape)] == "s":
        return Kept(layout, tuple(kept))
    return Blocked(f"{name_of(node)} sums over the sequence axis")


def _is_view_of_input(node: fx.Node) -> bool:
    """An input, or a part of one: a view computes nothing."""
    while node.op not in ("placeholder", "get_attr"):
        index = node.args[1:] if node.target is operator.getitem else ()
        plain = not any(isinstance(i, fx.Node) for i in (index[0] if index and isinstance(index[0], tuple) else index))
        basic = node.target is operator.getitem and plain
        if not basic and name_of(node) not in ("narrow", "select", "unsqueeze", "expand", "transpose", "permute"):
            return False
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or shape_of(source) is None:
            return False
        node = source
    return True


def _arange(node: fx.Node) -> Step:
    found = counted_from(node)
    return Blocked(f"{node.name} is an arange with symbolic bounds") if found is None else Arange(*found)


def _pointwise(node: fx.Node, layout: str) -> Step:
    layouts: dict[fx.Node, str] = {}
    for operand in node.all_input_nodes:
        shape = shape_of(operand)
        if shape is None and isinstance(example(operand), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            layouts[operand] = ""
            continue
        if shape is None:
            return Blocked(f"{name_of(node)} has an operand that is not a tensor")
        own = (shape_of(node) or ())[::-1]
        if len(shape) > len(own) or any(n not in (1, m) for n, m in zip(shape[::-1], own, strict=False)):
            return Blocked(f"{name_of(node)} has an operand {shape} that does not broadcast to its result")
        layouts[operand] = broadcast(layout, shape)
    return Pointwise(layouts)


def _moved(node: fx.Node, source: fx.Node, layout: str, heads: int) -> Step | None:
    """Ops that move, add or drop axes."""
    shape, was = shape_of(node), shape_of(source)
    if shape is None or was is None:
        return None
    name = name_of(node)
    rest: list[Any] = list(node.args[1:])
    if name == "view" and example(node).dtype != example(source).dtype:
        return Blocked("view reads the bits as another dtype")
    if name in ("transpose", "swapaxes") and all(isinstance(a, int) for a in rest) and len(rest) == 2:
        letters = list(layout)
        i, j = (a % len(was) for a in rest)
        letters[i], letters[j] = letters[j], letters[i]
        return View(source, "".join(letters))
    if name == "permute":
        flat = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        if len(flat) != len(was):
            return Blocked(f"{node.name} names its axes by keyword")
        order = [a % len(was) for a in flat]
        letters = [""] * len(was)
        for axis, origin in enumerate(order):
            letters[origin] = layout[axis]
        return View(source, "".join(letters))
    if name in ("expand", "expand_as", "broadcast_to"):
        return View(source, broadcast(layout, was))
    if name == "repeat" and all(isinstance(a, int) for a in rest):
        return _repeat(source, shape, was, layout, heads)
    if name in ("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten"):
        return _regrouped(node, source, layout, heads)
    return None


def _repeat(source: fx.Node, shape: tuple[int, ...], was: tuple[int, ...], layout: str, heads: int) -> Step:
    """Axes of size one may be repeated at will, and all heads for every row of a merged axis."""
    lead = len(shape) - len(was)
    letters = []
    for name, size, old in zip(layout[lead:], shape[lead:], was, strict=True):
        if old not in (1, size) and not (name == "m" and old == heads):
            return Blocked(f"repeat from {was} to {shape}")
        letters.append("1" if old == 1 else "h" if old != size else name)
    return View(source, "".join(letters))


def _regrouped(node: fx.Node, source: fx.Node, layout: str, heads: int) -> Step:
    """Axes of size one may come and go, batch and heads may merge and split; all keep their order."""
    shape, was = shape_of(node) or (), shape_of(source) or ()
    kept = [(n, size) for n, size in zip(layout, shape, strict=True) if size != 1]
    old = [size for size in was if size != 1]
    names = "".join(n for n, _ in kept)
    if old != [size for _, size in kept]:
        if "m" in names:
            at = names.index("m")
            kept[at : at + 1] = [("b", kept[at][1] // heads), ("h", heads)]
        elif "bh" in names:
            at = names.index("b")
            kept[at : at + 2] = [("m", kept[at][1] * kept[at + 1][1])]
    if old != [size for _, size in kept] or "s" not in [n for n, _ in kept]:
        return Blocked(f"{name_of(node)} from {was} to {shape} merges or splits axes")
    left = iter(n for n, _ in kept)
    return View(source, "".join("1" if size == 1 else next(left) for size in was))


def _getitem(node: fx.Node, source: fx.Node, index: Any, layout: str) -> Step:
    was = shape_of(source)
    if was is None:
        return Blocked(f"{node.name} takes an item of something that is not a tensor")
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [item for item in items if isinstance(item, fx.Node) and shape_of(item) is not None]
    if tensors and len(tensors) == len(items) == len(was):
        return _table(source, tensors, layout)
    items = every_axis(index, len(was))
    letters: list[str] = []
    axis = out = 0
    rows: fx.Node | None = None
    for item in items:
        if item is None:
            out += 1
            continue
        if isinstance(item, slice):
            full = item.start in (None, 0) and item.step in (None, 1)
            if not full or not (item.stop is None or (isinstance(item.stop, int) and item.stop >= was[axis])):
                return Blocked(f"{node.name} slices {item} of {was}")
            letters.append(layout[out])
            out += 1
        elif isinstance(item, fx.Node) and rows is None and len(shape_of(item) or ()) == 1 and layout[out] in "q1":
            rows = item
            letters.append("q")
            out += 1
        elif item in (0, -1) and was[axis] == 1:
            letters.append("1")
        else:
            return Blocked(f"{node.name} takes item {item} of {was}")
        axis += 1
    names = "".join(letters)
    if rows is None:
        return View(source, named(names, was))
    if source.op not in ("placeholder", "get_attr"):
        return Blocked(f"{node.name} takes rows of a computed tensor")
    return Leaf(source, "".join(n if n in "sq" else m for n, m in zip(names, named(names, was), strict=True)), rows)


def _embedding(node: fx.Node, layout: str) -> Step:
    """`weight[index]`, whose last axis is that of the weights."""
    index, weight = (
        node.args[i] if len(node.args) > i else node.kwargs.get(n) for i, n in enumerate(("input", "weight"))
    )
    if not isinstance(index, fx.Node) or not isinstance(weight, fx.Node) or layout[-1] not in "bh":
        return Blocked(f"{node.name} looks up features")
    if weight.op not in ("placeholder", "get_attr"):
        return Blocked(f"{name_of(weight)} computes a table that is looked up")
    return Table(weight, (), (index, layout[-1]), {index: broadcast(layout[:-1], shape_of(index) or ())})


def _table(source: fx.Node, indices: list[fx.Node], layout: str) -> Step:
    functions: list[fx.Node] = []
    while source.op not in ("placeholder", "get_attr"):
        same = shape_of(source) == shape_of(source.all_input_nodes[0]) if len(source.all_input_nodes) == 1 else False
        same_bits = same and example(source).dtype == example(source.all_input_nodes[0]).dtype
        if same_bits and name_of(source) in ("view", "reshape", *SAME):
            source = source.all_input_nodes[0]
            continue
        if not same or not is_pointwise(source):
            return Blocked(f"{name_of(source)} computes a table that is looked up")
        functions.insert(0, source)
        source = source.all_input_nodes[0]
    layouts = {t: broadcast(layout, shape_of(t) or ()) for t in indices}
    return Table(source, tuple(functions), tuple(indices), layouts)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Everything between a value and the graph inputs that carry its sequence axis."""

    leaves: tuple[Leaf, ...]
    """Leaves with a sequence axis."""
    sources: tuple[fx.Node, ...]
    """Where the sequence axis comes from: the leaves' inputs, and constructors as long as the context."""
    computed: tuple[fx.Node, ...]
    """Nodes that produce new elements (not views) along the sequence axis."""
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    """(operand, reader) for everything that those nodes, and lookups, read."""
    kept: tuple[fx.Node, ...]
    """Nodes that stay as long as the context."""
    blocked: Blocked | None


def trace(node: fx.Node, layout: str, heads: int) -> Trace:
    """Follow `step` from `node` to the leaves. Stops at the first node that blocks."""
    leaves: list[Leaf] = []
    sources: list[fx.Node] = []
    computed: list[fx.Node] = []
    reads: list[tuple[fx.Node, fx.Node]] = []
    kept: list[fx.Node] = []
    blocked: Blocked | None = None
    stack, seen = [(node, layout)], set()
    while stack:
        current, names = stack.pop()
        if (current, names) in seen:
            continue
        seen.add((current, names))
        if "s" not in names:
            continue
        found = step(current, names, heads)
        if isinstance(found, Blocked):
            blocked = found
            break
        if isinstance(found, Leaf):
            leaves.append(found)
            sources.append(found.source)
            reads.extend((n, current) for n in (found.source, found.rows) if found.rows is not None and n is not None)
        elif isinstance(found, (Arange, Fill)):
            sources.append(current)
        elif isinstance(found, Kept):
            kept.extend(found.nodes)
            reads.extend((n.all_input_nodes[0], n) for n in found.nodes)
        elif isinstance(found, View):
            if name_of(current) in SAME:  # perhaps a copy, which may be changed by itself
                computed.append(current)
                reads.append((found.source, current))
            stack.append((found.source, found.layout))
        elif isinstance(found, (Pointwise, Table)):
            computed.append(current)
            stack.extend(found.layouts.items())
            reads.extend((operand, current) for operand in found.layouts)
            if isinstance(found, Table):
                sources.append(found.source)
                reads.append((found.source, current))
    return Trace(tuple(leaves), tuple(sources), tuple(computed), tuple(reads), tuple(kept), blocked)
