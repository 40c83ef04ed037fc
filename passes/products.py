"""Products of two tensors in letters, one an axis, as in an einsum: `matmul`, `bmm`, `einsum`. Analysis only."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

from torch import fx

from sfi_compile.passes.shapes import name_of, shape_of

_PRODUCTS = frozenset(["matmul", "bmm", "baddbmm", "einsum", "mm", "mv", "addmm", "__matmul__", "__rmatmul__"])
_MOVES = frozenset(["transpose", "swapaxes", "swapdims", "permute"])
TURNS = frozenset(["mT", "mH", "T", "H", "numpy_T", "matrix_H"])
"""Attributes that swap the last two axes, the last four of matrices only; real numbers are their own conjugates.

Torch versions trace them as `getattr` or as operators.
"""


@dataclasses.dataclass(frozen=True)
class Operand:
    """A factor, and a letter for each of its axes."""

    node: fx.Node
    letters: str


@dataclasses.dataclass(frozen=True)
class Product:
    """left · right, summed over the letters that the result lacks. Axes of size one broadcast."""

    node: fx.Node
    left: Operand
    right: Operand
    letters: str
    """Of the result."""
    factor: float = 1.0
    added: fx.Node | None = None
    """`baddbmm`'s input, times `weight`."""
    weight: float = 1.0

    @property
    def contracted(self) -> str:
        """Letters that are summed over."""
        both = set(self.left.letters) & set(self.right.letters)
        return "".join(sorted(both - set(self.letters)))


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies two tensors and sums."""
    return node.op in ("call_function", "call_method") and name_of(node) in _PRODUCTS


def product_of(node: fx.Node) -> Product | None:
    """The product that a node computes; None if it is none that letters can say."""
    if not is_product(node) or node.kwargs.get("out") is not None or name_of(node) in ("addmm", "__rmatmul__"):
        return None
    if name_of(node) == "einsum":
        return _einsum(node)
    names: tuple[str, ...] = ("input", "batch1", "batch2") if name_of(node) == "baddbmm" else ("input", "other")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    given["other"] = given.get("other", given.get("mat2"))
    factors = [given[n] for n in (("batch1", "batch2") if "batch1" in given else ("input", "other"))]
    shapes = [shape_of(f) if isinstance(f, fx.Node) else None for f in factors]
    shape = shape_of(node)
    if shape is None or any(s is None or len(s) < 2 for s in shapes):
        return None
    lead = string.ascii_lowercase[: len(shape) - 2]
    left, right = (lead[len(lead) - (len(s or ()) - 2) :] for s in shapes)
    result = Product(node, Operand(factors[0], left + "xy"), Operand(factors[1], right + "yz"), lead + "xz")
    if "batch1" not in given:
        return result
    alpha, beta = given.get("alpha", 1.0), given.get("beta", 1.0)
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        return None
    added = given["input"] if beta else None
    return dataclasses.replace(result, factor=float(alpha), added=added, weight=float(beta))


def _einsum(node: fx.Node) -> Product | None:
    equation = node.args[0]
    operands: Any = node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    shapes = [shape_of(o) if isinstance(o, fx.Node) else None for o in operands]
    if not isinstance(equation, str) or len(operands) != 2 or any(s is None for s in shapes):
        return None
    left, right, out = spelled_out(equation, [len(s or ()) for s in shapes])
    if len(set(left)) < len(left) or len(set(right)) < len(right) or not set(out) <= set(left) | set(right):
        return None
    if not set(left) ^ set(right) <= set(out):
        return None  # sums over an axis of one factor
    return Product(node, Operand(operands[0], left), Operand(operands[1], right), out)


def spelled_out(equation: str, ranks: list[int]) -> list[str]:
    """The letters of an einsum's operands and of its result, with an ellipsis and a missing result written out."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    unused = [n for n in string.ascii_letters if n not in equation]
    terms, most = inputs.split(","), 0
    for i, (term, rank) in enumerate(zip(terms, ranks, strict=False)):
        if "..." in term:
            count = rank - len(term) + 3
            most = max(most, count)
            terms[i] = term.replace("...", "".join(unused[9 - count : 9]))
    ellipsis = "".join(unused[9 - most : 9])
    if "->" not in equation:
        once = sorted(n for n in set(inputs) - set(".,") if inputs.count(n) == 1)
        out = ("..." if most else "") + "".join(once)
    return [*terms, out.replace("...", ellipsis)]


def order_of(node: fx.Node) -> tuple[int, ...] | None:
    """The order in which a node permutes the axes of its operand; None if it does not permute."""
    source = node.args[0] if node.args else None
    shape = shape_of(source) if isinstance(source, fx.Node) else None
    name = name_of(node) if name_of(node) != "getattr" else node.args[1]
    turns = shape is not None and name in TURNS and (len(shape) == 2 or name in ("mT", "mH"))
    if shape is None or not (name in _MOVES or turns):
        return None
    rank = len(shape)
    order = list(range(rank))
    given: list[Any] = [a for a in (*node.args[1:], *node.kwargs.values()) if not isinstance(a, str)]
    if not all(isinstance(a, (int, tuple, list)) for a in given):
        return None
    if name == "permute":
        axes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        return tuple(a % rank for a in axes) if len(axes) == rank else None
    i, j = (-2, -1) if turns else (given[0], given[1])
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def unpermuted(operand: Operand) -> Operand:
    """The same factor below any permutations of its axes."""
    node, letters = operand.node, operand.letters
    while True:
        order = order_of(node)
        if order is None:
            return Operand(node, letters)
        below = [""] * len(order)
        for axis, origin in enumerate(order):
            below[origin] = letters[axis]
        source: Any = node.args[0]
        node, letters = source, "".join(below)
