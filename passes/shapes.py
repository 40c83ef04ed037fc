"""What a node is called, what shape it has, and whether it works element by element. Shared by whoever follows axes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example, size_hint

_FUNCTIONS = frozenset(
    getattr(operator, name)
    for name in (
        "add sub mul truediv floordiv mod neg pos invert and_ or_ xor lt le gt ge eq ne pow rshift lshift"
    ).split()
) | frozenset(
    getattr(torch, name)
    for name in (
        "add sub mul div true_divide neg where logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
        "lt le gt ge eq ne minimum maximum clamp exp log sqrt rsqrt tanh sigmoid pow square abs cos sin floor round "
        "remainder floor_divide bitwise_right_shift bitwise_left_shift masked_fill logical_xor log1p reciprocal"
    ).split()
)
_METHODS = frozenset(
    (
        "to float half double bfloat16 bool int long type type_as add sub mul div neg lt le gt ge eq ne logical_and "
        "logical_or logical_not bitwise_and bitwise_or masked_fill where clamp clamp_min clamp_max exp log sqrt rsqrt "
        "tanh sigmoid pow square abs cos sin floor round minimum maximum relu remainder reciprocal true_divide"
    ).split()
)
_ACTIVATIONS = frozenset(["relu", "silu", "gelu", "softplus", "elu", "leaky_relu", "sigmoid", "tanh"])
_DUNDERS = frozenset(
    f"__{name}__"
    for name in "eq ne lt le gt ge and or xor invert neg add sub mul truediv rshift lshift radd rsub rmul rand".split()
)
"""Some torch versions trace `a == b` as a call of the method."""
SAME = frozenset(["contiguous", "clone", "detach", "alias"])
"""Methods that return the same elements."""
CAT = frozenset(["cat", "concat", "concatenate"])


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Sizes of a node's tensor value; None if it is no tensor. A symbolic size counts as what it is now, unpinned."""
    value = example(node)
    return tuple(size_hint(n) for n in value.shape) if isinstance(value, torch.Tensor) else None


def description(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    """Sizes, strides, dtype and device of a node's value, as numbers."""
    value = example(node)
    return tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device


def name_of(node: fx.Node) -> str:
    """The method's or function's plain name."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def every_axis(index: Any, rank: int) -> list[Any]:
    """The items of an index into a tensor of `rank` axes, with one for every axis, and None for every new one."""
    items = list(index) if isinstance(index, tuple) else [index]
    missing = rank - sum(item is not None and item is not Ellipsis for item in items)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


def counted_from(node: fx.Node) -> tuple[int, int] | None:
    """(start, step) of an `arange` whose bounds are numbers; None of any other."""
    numbers = [a for a in node.args if isinstance(a, int)]
    if len(numbers) != len(node.args) or {"start", "end", "step"} & set(node.kwargs):
        return None
    return (0, 1) if len(numbers) == 1 else (numbers[0], numbers[2] if len(numbers) > 2 else 1)


def is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the result is a function of one element of each operand, after broadcasting."""
    name = name_of(node)
    if name in ("min", "max"):  # of two tensors; of one, they reduce
        return len(node.args) == 2 and isinstance(node.args[1], fx.Node)
    if node.op == "call_function" and (node.target in _FUNCTIONS or name in _ACTIVATIONS):
        return True
    return name in _DUNDERS or (node.op == "call_method" and name in _METHODS)


def constant_of(node: fx.Node) -> float | None:
    """The number that `torch.full` fills a node with; None: it is made otherwise."""
    number = node.args[1] if node.target is torch.full and len(node.args) > 1 else None
    return float(number) if isinstance(number, (int, float)) else None
