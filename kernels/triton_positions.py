"""Triton source that all kernels of a selection share: which positions of a row count, arithmetic, and keys.

A row that does not refresh has length zero. Arithmetic is fast or portable: `fast` is for NVIDIA devices, the other for
an interpreter. Imports triton only.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
READY = tl.constexpr(0)
"""`RowStatus.READY`."""
NO_KEY = tl.constexpr(-2147483647)
"""The key of what is no candidate, below that of any number."""


@triton.jit
def length_of(slow_rows, status, extent, b):
    """Positions to work on in row b: none unless it refreshes."""
    refreshes = tl.load(slow_rows + b) & (tl.load(status + b) == READY)
    return tl.where(refreshes, tl.load(extent + 3 * b + 1), 0).to(tl.int32)


@triton.jit
def read_until(length, size):
    """A bound for loads: `length` rounded up, so that whole vectors are loaded. What lies between may be anything."""
    return tl.minimum((length + 15) // 16 * 16, size)


@triton.jit
def exp2(x, fast: tl.constexpr):
    """2^x; zero instead of what is below 2^-126."""
    if fast:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def log2(x, fast: tl.constexpr):
    """log2(x), within 2^-22 of its size (or of one)."""
    if fast:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def split_fours(x):
    """The four columns of x [n, m, 4]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def key_of(score, place):
    """Scores as int32 in their order; `NO_KEY` where the place is -inf, which says that there is no candidate."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # zero is the one number with two representations
    return tl.where(place > NEG_INF, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_KEY)
