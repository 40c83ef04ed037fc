"""The ways of writing a step's tokens into a cache: which positions, and what.

Raises `Refusal` for all others. Analysis only, for `reads`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import distance, example
from sfi_compile.passes.base import Refusal
from sfi_compile.passes.shapes import every_axis, name_of, shape_of

_Written = tuple[fx.Node | int, int, fx.Node, bool]
"""First position (or all), count, value, whether the value lacks the axis: as in `CacheWrite`."""


def position_and_value(write: fx.Node, root: fx.Node, axis: int, what: str) -> _Written:
    """What `write` writes into `root`, whose sequence axis is `axis`, and where."""
    shape = shape_of(root) or ()
    target: Any = write.args[0]
    found: _Written | None = None
    if write.target is operator.setitem:
        found = _at_index(target, write.args[1], write.args[2], root, axis)
    elif name_of(write) == "copy_" and isinstance(target, fx.Node):
        found = _into_slice(target, write.args[1], root, axis)
    elif name_of(write) in ("index_copy_", "scatter_") and len(write.args) == 4 and _all_of(target, root):
        _, dim, index, value = write.args
        if isinstance(dim, int) and isinstance(index, fx.Node) and isinstance(value, fx.Node):
            places = _one_position(index, shape, axis) if name_of(write) == "scatter_" else index
            if dim % len(shape) == axis and places is not None:
                found = _tensor(places, value)
    if found is not None and _fits(found, shape, axis) and not write.kwargs:
        return found
    if name_of(write) == "copy_" and _all_of(target, root):
        explanation = f"the whole cache of {shape[axis]} positions is written anew ({what}), as by a window that rolls"
        raise Refusal("rolling-window", explanation, "none for a window, which is short; else write with index_copy_")
    hint = "use index_copy_, or cache[:, :, position] = value with the same position for all rows"
    raise Refusal("cache-write", f"{what} are written by {name_of(write)} ({write.name})", hint)


def _all_of(target: Any, root: fx.Node) -> bool:
    """Whether a node is the root, or the root by another name."""
    while isinstance(target, fx.Node) and target is not root and name_of(target) in ("view", "detach", "alias"):
        same = shape_of(target) == shape_of(root) and example(target).dtype == example(root).dtype
        target = target.args[0] if same else None
    return target is root


def _tensor(index: fx.Node, value: fx.Node) -> _Written | None:
    shape = shape_of(index)
    if shape is None or len(shape) > 1 or example(index).dtype == torch.bool:
        return None
    return index, (shape or (1,))[0], value, False


def _at_index(target: Any, index: Any, value: Any, root: fx.Node, axis: int) -> _Written | None:
    """`root[:, :, position] = value`, the position a tensor, a number or a slice."""
    if not _all_of(target, root) or not isinstance(value, fx.Node):
        return None
    items = every_axis(index, len(shape_of(root) or ()))
    if len(items) <= axis or any(item != slice(None) for i, item in enumerate(items) if i != axis):
        return None
    return _place(items[axis], value)


def _place(item: Any, value: fx.Node) -> _Written | None:
    if isinstance(item, fx.Node):
        found = _tensor(item, value) if isinstance(example(item), torch.Tensor) else (item, 1, value, True)
        return found if found is None else (*found[:3], shape_of(item) in (None, ()))
    if isinstance(item, slice):
        start = 0 if item.start is None else item.start
        plain = item.step in (None, 1) and not (isinstance(start, int) and start < 0)
        count = distance(start, item.stop) if plain else None
        return None if count is None else (start, count, value, False)
    return (item, 1, value, True) if isinstance(item, int) and item >= 0 else None


def _into_slice(target: fx.Node, value: Any, root: fx.Node, axis: int) -> _Written | None:
    """`root[:, :, p:p+1].copy_(value)`, `root.narrow(2, p, 1).copy_(value)`, `root.select(2, p).copy_(value)`."""
    source: Any = target.args[0] if target.args else None
    if not _all_of(source, root) or not isinstance(value, fx.Node):
        return None
    size = (shape_of(root) or ())[axis]
    if target.target is operator.getitem:
        found = _at_index(source, target.args[1], target, root, axis)
        # Of the slice, whose length is that of what is written.
        return None if found is None else (*found[:2], value, found[3])
    if name_of(target) in ("narrow", "select") and len(target.args) >= 3:
        dim, start = target.args[1:3]
        if not isinstance(dim, int) or dim % len(shape_of(root) or ()) != axis:
            return None
        count = target.args[3] if name_of(target) == "narrow" and len(target.args) > 3 else 1
        if isinstance(start, (int, fx.Node)) and isinstance(count, int) and count < size:
            return start, count, value, name_of(target) == "select"
    return None


def _one_position(index: fx.Node, shape: tuple[int, ...], axis: int) -> fx.Node | None:
    """The one position that the index of a scatter repeats for the whole of every other axis."""
    if shape_of(index) != (*shape[:axis], 1, *shape[axis + 1 :]):
        return None
    while name_of(index) in (
        "expand",
        "expand_as",
        "repeat",
        "view",
        "reshape",
        "unsqueeze",
        "broadcast_to",
        "getitem",
    ):
        source = index.args[0]
        own = shape_of(source) if isinstance(source, fx.Node) else None
        if not isinstance(source, fx.Node) or own is None or (math.prod(own) > 1 and len(own) <= 1):
            break
        index = source
    own = shape_of(index)
    return index if own in ((), (1,)) else None


def _fits(written: _Written, shape: tuple[int, ...], axis: int) -> bool:
    """Whether the value broadcasts to the root's rows at those positions."""
    _, count, value, lacks = written
    own = shape_of(value)
    if own is None or not 1 <= count < max(shape[axis], 2):
        return False
    full = (*shape[:axis], *(() if lacks else (count,)), *shape[axis + 1 :])
    return len(own) <= len(full) and all(a in (1, b) for a, b in zip(own[::-1], full[::-1], strict=False))
