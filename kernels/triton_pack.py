"""Triton source of packing: the support of the rows that refresh, and their keys and values, in one launch; and of
appending to the memory of the other rows.

Imports triton, `triton_addresses` and `triton_positions`; `pack_cuda.py` launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfi_compile.kernels.triton_addresses import at
from sfi_compile.kernels.triton_positions import READY


@triton.jit
def copy(
    x, memory, position, first, d0, b, h, stride_b, stride_h, stride_n, stride_d, width, inside, block_d: tl.constexpr
):  # fmt: skip
    """Part of the rows of x at the positions, to the memory's rows from `first` on; zero where the position is -1."""
    d = d0 + tl.arange(0, block_d)[None, :]
    held = (position >= 0)[:, None]
    x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    x_at = tl.maximum(position, 0)[:, None] * stride_n + d * stride_d
    rows = tl.load(x + x_at, held & (d < width), other=0.0)
    to = (first + tl.arange(0, position.shape[0]))[:, None] * width + d
    tl.store(memory + to, rows, inside[:, None] & (d < width))


@triton.jit
def pack(
    table, like, selected, frame, slow_rows, status,
    batch, sites, heads, slots, sink, chosen, key_dim, value_dim,
    k_stride_b, k_stride_h, k_stride_n, k_stride_d, v_stride_b, v_stride_h, v_stride_n, v_stride_d,
    aligned: tl.constexpr, block_s: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Fills `block_s` slots of one head. Wide rows are copied in parts of `block_d`.

    The last axis of the grid is the row of one of several sites, site by site. `table` holds the addresses of what the
    sites have of their own: keys and values, of the type of `like`, then held positions, then the memory's keys and
    values.
    """
    h, site, b = tl.program_id(1), tl.program_id(2) // batch, tl.program_id(2) % batch
    refreshes = tl.load(slow_rows + b) & (tl.load(status + b) == READY)
    if refreshes == 0:
        return
    s = tl.program_id(0) * block_s + tl.arange(0, block_s)
    inside = s < slots
    head = (b * heads + h).to(tl.int64)
    chosen_here = selected + (site * batch * heads).to(tl.int64) * chosen + head * chosen
    by_selector = (s >= sink) & (s < sink + chosen)
    of_frame = tl.load(frame + b.to(tl.int64) * slots + s, inside & (by_selector == 0), other=-1)
    of_selector = tl.load(chosen_here + s - sink, inside & by_selector, other=-1)
    position = tl.maximum(of_frame, of_selector)
    first = head * slots + tl.program_id(0) * block_s
    held = at(table, 2 * sites + site, selected, aligned)
    tl.store(held + head * slots + s, position, inside)
    k, mem_k = at(table, site, like, aligned), at(table, 3 * sites + site, like, aligned)
    for d0 in range(0, key_dim, block_d):
        copy(k, mem_k, position, first, d0, b, h,
             k_stride_b, k_stride_h, k_stride_n, k_stride_d, key_dim, inside, block_d)  # fmt: skip
    v, mem_v = at(table, sites + site, like, aligned), at(table, 4 * sites + site, like, aligned)
    for d0 in range(0, value_dim, block_d):
        copy(v, mem_v, position, first, d0, b, h,
             v_stride_b, v_stride_h, v_stride_n, v_stride_d, value_dim, inside, block_d)  # fmt: skip


@triton.jit
def append(
    k, v, slow_rows, positions, refreshed_at, held, mem_k, mem_v,
    heads, slots, offset, key_dim, value_dim, step,
    k_stride_b, k_stride_h, k_stride_n, k_stride_d, v_stride_b, v_stride_h, v_stride_n, v_stride_d,
    block_d: tl.constexpr,
):  # fmt: skip
    """Appends one token of the step to the memory of one head of a row that is not slow."""
    h, b = tl.program_id(1), tl.program_id(2)
    if tl.load(slow_rows + b):
        return
    # A program that holds one position, in the shape that `copy` takes.
    position = tl.load(positions + tl.program_id(0) * step + tl.zeros([1], tl.int32))
    slot = tl.minimum(tl.maximum(position - tl.load(refreshed_at + b) + offset, 0), slots - 1)
    first = (b * heads + h).to(tl.int64) * slots
    tl.store(held + first + slot, position)
    first = tl.sum(first + slot, 0)
    inside = position >= 0
    for d0 in range(0, key_dim, block_d):
        copy(k, mem_k, position, first, d0, b, h,
             k_stride_b, k_stride_h, k_stride_n, k_stride_d, key_dim, inside, block_d)  # fmt: skip
    for d0 in range(0, value_dim, block_d):
        copy(v, mem_v, position, first, d0, b, h,
             v_stride_b, v_stride_h, v_stride_n, v_stride_d, value_dim, inside, block_d)  # fmt: skip
