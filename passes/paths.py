"""From one axis of a value up to the graph inputs that it comes from, and whether that axis is a context.

`path` is strict: along it, positions keep to themselves. `context` asks only whether tokens of a cache stand along an
axis, whatever was done to them. Analysis only.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes import along
from sfi_compile.passes.base import Refusal
from sfi_compile.passes.dataflow import DataFlow, mutated_argument
from sfi_compile.passes.products import product_of
from sfi_compile.passes.shapes import name_of, shape_of
from sfi_compile.passes.writes import position_and_value

_REARRANGED = frozenset(["cumsum", "flip", "roll", "sort", "topk"])
"""Along one axis: what is there afterwards comes from that axis still."""


@dataclasses.dataclass(frozen=True)
class Path:
    """Everything between a value and the graph inputs that carry one of its axes."""

    leaves: tuple[along.Leaf, ...]
    sources: tuple[fx.Node, ...]
    """Where the axis enters: the leaves' inputs, and constructors."""
    computed: tuple[fx.Node, ...]
    """Nodes that produce new elements."""
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    """(operand, reader) for all that those nodes read."""
    fixed: tuple[fx.Node, ...]
    """Operands that lack the axis: what elements are computed from beside the leaves."""
    filling: frozenset[fx.Node]
    """Writes that assemble a new tensor."""
    blocked: along.Blocked | None


def path(node: fx.Node, axis: int, flow: DataFlow) -> Path:
    """Follow `step` from axis `axis` of `node` to the leaves. Stops at the first node that blocks."""
    leaves: dict[along.Leaf, None] = {}
    sources: dict[fx.Node, None] = {}
    computed: list[fx.Node] = []
    reads: list[tuple[fx.Node, fx.Node]] = []
    fixed: list[fx.Node] = []
    filling: set[fx.Node] = set()
    stack, seen = [(node, axis)], set()
    while stack:
        current, at = stack.pop()
        if (current, at) in seen:
            continue
        seen.add((current, at))
        found = along.step(current, at, flow)
        if isinstance(found, along.Blocked):
            return Path((), (), (), (), (), frozenset(), found)
        if isinstance(found, along.Leaf):
            leaves[found] = None
            sources[found.source] = None
        elif isinstance(found, along.Count):
            sources[current] = None
        elif isinstance(found, along.Same):
            if flow.origin(current) is current:  # a copy, which may be changed by itself
                computed.append(current)
                reads.append((found.source, current))
            stack.append((found.source, at))
        elif isinstance(found, along.Assembled):
            sources[current] = None
            filling.update(write for write, _, _ in found.writes)
            stack.extend((value, place) for _, value, place in found.writes)
            reads.extend((value, write) for write, value, _ in found.writes)
        else:
            if flow.origin(current) is current:
                computed.append(current)
                reads.extend((operand, current) for operand in current.all_input_nodes)
            fixed.extend(n for n in current.all_input_nodes if n not in found.axes)
            stack.extend(found.axes.items())
    return Path(tuple(leaves), tuple(sources), tuple(computed), tuple(reads), tuple(fixed), frozenset(filling), None)


def is_cached(found: Path, flow: DataFlow) -> bool:
    """Whether a path leads to a cache: an input that this step writes into, or makes longer."""
    return found.blocked.grows if found.blocked is not None else any(flow.writes(leaf.source) for leaf in found.leaves)


def new_tokens(found: Path, flow: DataFlow) -> int | None:
    """Positions that the step writes into the cache at the end of a path; None if that cannot be told."""
    for leaf in found.leaves:
        for write in flow.writes(leaf.source):
            try:
                return position_and_value(write, leaf.source, leaf.axis, "values")[1]
            except Refusal:
                continue
    return None


def is_written_along(node: fx.Node, axis: int, flow: DataFlow) -> bool:
    """Whether axis `axis` of a value is, position by position, that along which this step writes tokens to a cache."""
    found = path(node, axis, flow)
    return found.blocked.grows if found.blocked is not None else new_tokens(found, flow) is not None


def ends(node: fx.Node, axis: int, flow: DataFlow) -> list[along.Leaf | along.Blocked]:
    """All inputs, and concatenations that make an input longer, that an axis comes from, whatever is done along it."""
    found: list[along.Leaf | along.Blocked] = []
    stack, seen = [(node, axis)], set()
    while stack:
        current, at = stack.pop()
        shape = shape_of(current)
        if (current, at) in seen or (shape is not None and at >= len(shape)):
            continue
        seen.add((current, at))
        product = product_of(current)
        if product is not None:
            stack += [(f.node, f.letters.find(product.letters[at])) for f in (product.left, product.right)
                      if product.letters[at] in f.letters]  # fmt: skip
            continue
        source, step = current.args[0] if current.args else None, along.step(current, at, flow)
        if isinstance(step, along.Leaf):
            found.append(step)
        elif isinstance(step, along.Same):
            stack.append((step.source, at))
        elif isinstance(step, along.Apply):
            stack += step.axes.items()
        elif isinstance(step, along.Assembled):
            stack += [(value, place) for _, value, place in step.writes]
        elif isinstance(step, along.Blocked) and step.grows:
            found.append(step)
        elif isinstance(source, fx.Node) and (
            mutated_argument(current) is source or name_of(current) in _REARRANGED or shape_of(source) is None
        ):  # the last: an item of several results, such as the values of `topk`
            stack.append((source, at))
    return found


def context(node: fx.Node, axis: int, flow: DataFlow) -> int | None:
    """How many of its tokens this step writes along an axis, if tokens of a cache stand there; 0 if that is not known.

    None: no context. A cache has at least three axes: a count of the tokens chosen so far, for a penalty, is none.
    """
    for end in ends(node, axis, flow):
        if isinstance(end, along.Blocked):
            return 0
        for write in flow.writes(end.source) if len(shape_of(end.source) or ()) >= 3 else ():
            try:
                return position_and_value(write, end.source, end.axis, "keys")[1]
            except Refusal as refusal:
                value = write.args[1] if refusal.code == "rolling-window" else None
                if isinstance(value, fx.Node) and path(value, end.axis, flow).blocked is not None:
                    return 0  # it moves along; a state that is updated in place keeps to itself
    return None


def is_given(node: fx.Node, axis: int, flow: DataFlow) -> tuple[str, ...]:
    """Names of the inputs that an axis comes from, if all are data that this step writes nothing into; else empty.

    Such as what an encoder left for cross-attention; parameters are none.
    """
    leaves = [end for end in ends(node, axis, flow) if isinstance(end, along.Leaf)]
    for source in (leaf.source for leaf in leaves):
        parameter = source.op != "placeholder" or isinstance(example(source), torch.nn.Parameter)
        if parameter or flow.writes(source) or len(shape_of(source) or ()) < 3:
            return ()
    return tuple(dict.fromkeys(leaf.source.name for leaf in leaves))
