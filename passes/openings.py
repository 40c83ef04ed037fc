"""Masks that open: could a token be let through later that is blocked now?

A memory holds no token that its refresh could not attend to. So that no later step misses one, a mask may close as the
step's position moves on, as a window does, and not open. Every value that a mask is computed from gets a kind, by how
it depends on the step's numbers (its position). `j <= p` is what causality looks like: true for every token that is
there, now and later. Comparisons by order with `p`, `p - j`, or their multiples are taken to be of that kind. Equality
is not: `(p - j) % 3 == 0` opens other tokens at every step. Masks that are inputs, or looked up in one, are not looked
into. Analysis only, by `axes.step`.
"""

from __future__ import annotations

import enum

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes import axes
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import name_of


class Kind(enum.IntEnum):
    """How a value depends on the step; of several operands, the largest counts."""

    FIXED = 0
    """Not at all."""
    CLOSING = 1
    """What comes of comparisons by order: it blocks, and never opens."""
    MOVING = 2
    """On the step alone."""
    ORDERED = 3
    """On step and token, rising or falling with the step."""
    ODD = 4
    """On step and token in another way."""
    OPENING = 5
    """It blocks, and may open."""


_ORDER = frozenset("lt le gt ge __lt__ __le__ __gt__ __ge__".split())
_EQUAL = frozenset("eq ne __eq__ __ne__".split())
_PERIODIC = frozenset("remainder mod fmod bitwise_and bitwise_xor __and__ __xor__ __mod__ sin cos".split())
_MONOTONE = frozenset(
    "add sub neg mul div truediv true_divide floor_divide floordiv clamp clamp_min clamp_max minimum maximum min max "
    "abs to float double half bfloat16 int long type type_as floor round relu masked_fill where "
    "__add__ __sub__ __radd__ __rsub__ __mul__ __rmul__ __neg__ __truediv__".split()
)


def opens(mask: fx.Node, layout: str, heads: int, flow: DataFlow) -> fx.Node | None:
    """The node by which a mask may open, None if it cannot; `layout` and `heads` as of `axes.trace`."""
    reader = _Reader(heads, flow)
    return reader.opening if reader.kind(mask, layout) == Kind.OPENING else None


class _Reader:
    def __init__(self, heads: int, flow: DataFlow) -> None:
        self.heads, self.flow = heads, flow
        self.known: dict[tuple[fx.Node, str], Kind] = {}
        self.opening: fx.Node | None = None

    def kind(self, node: fx.Node, layout: str) -> Kind:
        if (node, layout) not in self.known:
            self.known[node, layout] = self._kind(node, layout)
        return self.known[node, layout]

    def _kind(self, node: fx.Node, layout: str) -> Kind:
        if "s" not in layout:
            return self._of_the_step(node)
        found = axes.step(node, layout, self.heads)
        if isinstance(found, axes.View):
            return self.kind(found.source, found.layout)
        if isinstance(found, axes.Pointwise):
            return self._pointwise(node, {operand: self.kind(operand, own) for operand, own in found.layouts.items()})
        if isinstance(found, axes.Table):
            looked_up = max((self.kind(index, own) for index, own in found.layouts.items()), default=Kind.FIXED)
            # A table of a bias is followed like any number; one of what is allowed is like a mask that is an input.
            return Kind.FIXED if looked_up == Kind.FIXED or _is_bool(node) else Kind.ODD
        return Kind.FIXED

    def _of_the_step(self, node: fx.Node) -> Kind:
        """Of a value without a context axis: it may differ from step to step if whole numbers are among its inputs."""
        needed = self.flow.slice_of(node)
        if not any(_is_whole(n) for n in needed if n.op == "placeholder"):
            return Kind.FIXED
        # A flag may switch a mask off for good, and by anything but order it may switch it on again.
        odd = any(name_of(n) in _EQUAL or name_of(n) in _PERIODIC for n in needed)
        return Kind.MOVING if odd or not _is_bool(node) else Kind.CLOSING

    def _pointwise(self, node: fx.Node, operands: dict[fx.Node, Kind]) -> Kind:
        highest, name = max(operands.values(), default=Kind.FIXED), name_of(node)
        if highest in (Kind.FIXED, Kind.CLOSING, Kind.OPENING):
            return highest
        if name in _ORDER and highest != Kind.ODD:
            return Kind.CLOSING
        if name in _ORDER or name in _EQUAL or (_is_bool(node) and name not in ("where", "masked_fill")):
            return self._open(node)
        if name in ("where", "masked_fill"):
            # What decides; the numbers that it chooses from may be anything.
            deciding = [kind for operand, kind in operands.items() if _is_bool(operand)]
            if any(kind >= Kind.MOVING for kind in deciding) and _blocks(node):
                return self._open(node)
            return highest
        varying = sum(kind >= Kind.MOVING for kind in operands.values())
        monotone = name in _MONOTONE and (name not in ("mul", "__mul__", "__rmul__") or varying == 1)
        return max(highest, Kind.ORDERED) if monotone else Kind.ODD

    def _open(self, node: fx.Node) -> Kind:
        if self.opening is None:
            self.opening = node
        return Kind.OPENING


def _blocks(node: fx.Node) -> bool:
    """Whether a choice may be one of blocking: of a boolean, or with a large negative number among what it chooses."""
    numbers = [
        a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (int, float)) and not isinstance(a, bool)
    ]
    return _is_bool(node) or any(number <= -1e3 for number in numbers) or not numbers


def _is_bool(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _is_whole(node: fx.Node) -> bool:
    value = example(node)
    if isinstance(value, torch.Tensor):
        return not value.dtype.is_floating_point and value.dtype != torch.bool
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
