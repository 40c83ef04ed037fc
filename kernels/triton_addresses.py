"""Triton source of tables of addresses, by which one launch works on tensors that lie anywhere. Imports triton only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put(table, tensors):
    """The addresses of a tuple of tensors."""
    for i in tl.static_range(len(tensors)):
        tl.store(table + i, tensors[i].to(tl.int64))


@triton.jit
def at(table, i, like, aligned: tl.constexpr):
    """A pointer out of a table, of the type of `like`; `aligned`: it and `like` are multiples of 16 bytes.

    As a distance from `like`: of a pointer made of a number, Triton does not know that it is aligned.
    """
    itemsize: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    distance = (tl.load(table + i) - like.to(tl.int64)) // itemsize
    if aligned:
        distance = tl.multiple_of(distance, 16 // itemsize)
    return like + distance
