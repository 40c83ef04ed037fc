"""Named axes: how one step of a sequence-pointwise computation looks from below.

A value that attention reads (keys, values, a mask) is traced upwards node by node. Each axis has a letter: b(atch),
h(ead), q(uery), s(equence), d(feature); an axis of size one is `1`. `step` says what a node is in these terms; if it
is `Blocked`, a gather along s cannot be pushed through it. Analysis only: matching asks whether the gather can be
pushed to the roots, `commute_gather` then does it, both from this one table.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example, size_hint
from sfi_compile.passes.dataflow import mutated_argument


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
    """`f(source)[i, j, ...]` with tensor indices that broadcast to the node's layout, one per axis of `source`."""

    source: fx.Node
    """A graph input."""
    functions: tuple[fx.Node, ...]
    """Pointwise nodes with one operand between the source and the lookup, in program order."""
    indices: tuple[fx.Node, ...]
    layouts: dict[fx.Node, str]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A graph input (or something without a sequence axis): the gather ends here. `rows` picks entries of axis q."""

    source: fx.Node
    layout: str
    rows: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Blocked:
    """No gather can be pushed through this node."""

    reason: str


Step = View | Pointwise | Arange | Fill | Table | Leaf | Blocked

_POINTWISE_FUNCTIONS = frozenset(
    getattr(operator, name)
    for name in ("add sub mul truediv floordiv mod neg pos invert and_ or_ xor lt le gt ge eq ne pow").split()
) | frozenset(
    getattr(torch, name)
    for name in (
        "add sub mul div true_divide neg where logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
        "lt le gt ge eq ne minimum maximum clamp exp log sqrt rsqrt tanh sigmoid pow square abs"
    ).split()
)
_POINTWISE_METHODS = frozenset(
    (
        "to float half double bfloat16 bool int long type add sub mul div neg lt le gt ge eq ne logical_and "
        "logical_or logical_not bitwise_and bitwise_or masked_fill where clamp exp log sqrt rsqrt tanh sigmoid pow "
        "square abs"
    ).split()
)
_DUNDERS = frozenset(f"__{name}__" for name in "eq ne lt le gt ge and or xor invert neg add sub mul truediv".split())
"""Some torch versions trace `a == b` as a call of the method."""
_SAME = frozenset(["contiguous", "clone", "detach", "alias"])
_FILLS = {torch.zeros: 0, torch.ones: 1, torch.full: None}
_ALL = slice(None)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Sizes of a node's tensor value; None if it is no tensor. A symbolic size counts as what it is now, unpinned."""
    value = example(node)
    return tuple(size_hint(n) for n in value.shape) if isinstance(value, torch.Tensor) else None


def named(layout: str, shape: tuple[int, ...]) -> str:
    """The layout with `1` for every axis of size one except s."""
    return "".join(name if name == "s" or size != 1 else "1" for name, size in zip(layout, shape, strict=True))


def broadcast(layout: str, shape: tuple[int, ...]) -> str:
    """Layout of an operand of `shape` that broadcasts (right-aligned) to a result with `layout`."""
    tail = layout[len(layout) - len(shape) :]
    return "".join(name if size != 1 else "1" for name, size in zip(tail, shape, strict=True))


def step(node: fx.Node, layout: str) -> Step:
    """What `node`, whose axes are named by `layout`, is one level up."""
    shape = shape_of(node)
    if shape is None or len(shape) != len(layout):
        return Blocked(f"{node.name} is not a tensor with axes {layout!r}")
    if node.op in ("placeholder", "get_attr") or "s" not in layout:
        return Leaf(node, layout)
    written = mutated_argument(node)
    if written is not None:
        return View(written, layout) if shape_of(written) == shape else Blocked(f"{node.name} writes in place")
    target, args = node.target, node.args
    source = args[0] if args and isinstance(args[0], fx.Node) else None
    if node.op == "call_function":
        if target is torch.arange:
            return _arange(node)
        if target in _FILLS:
            filled = node.kwargs.get("fill_value", args[-1] if args else None)
            value = filled if target is torch.full else _FILLS[target]
            return Fill(value) if isinstance(value, (int, float, bool)) else Blocked(f"{node.name} fills with a tensor")
        if target is operator.getitem and source is not None:
            return _getitem(node, source, args[1], layout)
    if node.op == "call_method" and target in _SAME and source is not None:
        return View(source, layout)
    if _is_pointwise(node):
        return _pointwise(node, layout)
    if source is not None:
        moved = _moved(node, source, layout)
        if moved is not None:
            return moved
    return Blocked(f"{_name(node)} is not pointwise along the sequence axis")


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_pointwise(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _POINTWISE_FUNCTIONS:
        return True
    return _name(node) in _DUNDERS or (node.op == "call_method" and node.target in _POINTWISE_METHODS)


def _arange(node: fx.Node) -> Step:
    numbers = [a for a in node.args if isinstance(a, int)]
    if len(numbers) != len(node.args) or {"start", "end", "step"} & set(node.kwargs):
        return Blocked(f"{node.name} is an arange with symbolic bounds")
    start, step_by = (0, 1) if len(numbers) == 1 else (numbers[0], numbers[2] if len(numbers) > 2 else 1)
    return Arange(start, step_by)


def _pointwise(node: fx.Node, layout: str) -> Step:
    layouts: dict[fx.Node, str] = {}
    for operand in node.all_input_nodes:
        shape = shape_of(operand)
        if shape is None:
            return Blocked(f"{_name(node)} has an operand that is not a tensor")
        own = (shape_of(node) or ())[::-1]
        if len(shape) > len(own) or any(n not in (1, m) for n, m in zip(shape[::-1], own, strict=False)):
            return Blocked(f"{_name(node)} has an operand {shape} that does not broadcast to its result")
        layouts[operand] = broadcast(layout, shape)
    return Pointwise(layouts)


def _moved(node: fx.Node, source: fx.Node, layout: str) -> Step | None:
    """Ops that move, add or drop axes."""
    shape, was = shape_of(node), shape_of(source)
    if shape is None or was is None:
        return None
    name = _name(node)
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
    if name == "expand":
        return View(source, broadcast(layout, was))
    if name in ("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten"):
        # Only axes of size one may come and go; then the other axes keep their order.
        kept = [(n, size) for n, size in zip(layout, shape, strict=True) if size != 1 or n == "s"]
        if [size for size in was if size != 1] == [size for _, size in kept if size != 1]:
            letters, names = [], [n for n, size in kept if size != 1]
            for size in was:
                letters.append("1" if size == 1 else names.pop(0))
            if "s" in letters:
                return View(source, "".join(letters))
        return Blocked(f"{name} from {was} to {shape} merges or splits axes")
    return None


def _getitem(node: fx.Node, source: fx.Node, index: Any, layout: str) -> Step:
    was = shape_of(source)
    if was is None:
        return Blocked(f"{node.name} takes an item of something that is not a tensor")
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [item for item in items if isinstance(item, fx.Node) and shape_of(item) is not None]
    if tensors and len(tensors) == len(items) == len(was):
        return _table(source, tensors, layout)
    consumed = sum(1 for item in items if item is not None and item is not Ellipsis)
    if Ellipsis in [item for item in items if not isinstance(item, fx.Node)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [_ALL] * (len(was) - consumed)
    else:
        items += [_ALL] * (len(was) - consumed)
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
        else:
            return Blocked(f"{node.name} takes item {item} of {was}")
        axis += 1
    names = "".join(letters)
    if rows is None:
        return View(source, named(names, was))
    if source.op not in ("placeholder", "get_attr"):
        return Blocked(f"{node.name} takes rows of a computed tensor")
    return Leaf(source, "".join(n if n in "sq" else m for n, m in zip(names, named(names, was), strict=True)), rows)


def _table(source: fx.Node, indices: list[fx.Node], layout: str) -> Step:
    functions: list[fx.Node] = []
    while source.op not in ("placeholder", "get_attr"):
        same = shape_of(source) == shape_of(source.all_input_nodes[0]) if len(source.all_input_nodes) == 1 else False
        same_bits = same and example(source).dtype == example(source.all_input_nodes[0]).dtype
        if same_bits and _name(source) in ("view", "reshape", *_SAME):
            source = source.all_input_nodes[0]
            continue
        if not same or not _is_pointwise(source):
            return Blocked(f"{_name(source)} computes a table that is looked up")
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
    fixed: tuple[fx.Node, ...]
    """Operands without a sequence axis, and tables: what the elements are computed from beside the leaves."""
    blocked: Blocked | None


def trace(node: fx.Node, layout: str) -> Trace:
    """Follow `step` from `node` to the leaves. Stops at the first node that blocks."""
    leaves: list[Leaf] = []
    sources: list[fx.Node] = []
    computed: list[fx.Node] = []
    reads: list[tuple[fx.Node, fx.Node]] = []
    fixed: list[fx.Node] = []
    blocked: Blocked | None = None
    stack, seen = [(node, layout)], set()
    while stack:
        current, names = stack.pop()
        if (current, names) in seen:
            continue
        seen.add((current, names))
        if "s" not in names:
            continue
        found = step(current, names)
        if isinstance(found, Blocked):
            blocked = found
            break
        if isinstance(found, Leaf):
            leaves.append(found)
            sources.append(found.source)
            reads.extend((n, current) for n in (found.source, found.rows) if found.rows is not None and n is not None)
        elif isinstance(found, (Arange, Fill)):
            sources.append(current)
        elif isinstance(found, View):
            stack.append((found.source, found.layout))
        elif isinstance(found, (Pointwise, Table)):
            computed.append(current)
            stack.extend(found.layouts.items())
            reads.extend((operand, current) for operand in found.layouts)
            fixed.extend(operand for operand, names in found.layouts.items() if "s" not in names)
            if isinstance(found, Table):
                sources.append(found.source)
                reads.append((found.source, current))
                fixed.append(found.source)
    return Trace(tuple(leaves), tuple(sources), tuple(computed), tuple(reads), tuple(fixed), blocked)
