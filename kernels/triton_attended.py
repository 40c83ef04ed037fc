"""Triton source of scores made of attention alone: added up over slow steps, and carried on to later positions.

Two kernels in turn, over chunks of positions; the grid and `inputs` are as in `triton_scores`:

    add     logits → attention, added to what is left of the history, times the norm of the value
    carry   that → scores as integer keys

Whatever is summed in floating point is summed in a fixed order. Imports triton, `triton_addresses` and
`triton_positions`; `attended_cuda.py` launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfi_compile.kernels.triton_addresses import at
from sfi_compile.kernels.triton_positions import LOG2E, NEG_INF, exp2, key_of, length_of, log2, read_until, split_fours

SHORT = tl.constexpr(1)
"""`RowStatus.SHORT`: the last that adds to a history."""
SCALE = tl.constexpr(1.0 / 256)
"""Of scores, whose logarithms the ranges of `triton_top_k` expect below zero."""
LEAST = tl.constexpr(1.1754943508222875e-38)
"""Scores count as that much at least, so that their logarithms are finite."""


@triton.jit
def add(
    inputs, slow_rows, status, extent, position, since, worth, bins, listed,
    batch, sites, size, queries, stride_b, stride_h, stride_r, log_fading, per_step, aligned: tl.constexpr,
    heads: tl.constexpr, rows: tl.constexpr, block_r: tl.constexpr, block: tl.constexpr, keeps: tl.constexpr,
    by_value: tl.constexpr, n_bins: tl.constexpr, fast: tl.constexpr, per: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """`worth` [sites * B, H, N], the history, and zero in what is counted later.

    A program takes `per` chunks, reading the next while it works on one. `log_fading` is to base 2.
    """
    first, h, b = tl.program_id(0) * per, tl.program_id(1), tl.program_id(2)
    site, row = b // batch, b % batch
    found = tl.load(status + row)
    tokens = tl.load(since + row)
    length = tl.where(tl.load(slow_rows + row), tl.load(extent + 3 * row + 1), 0).to(tl.int32)
    # The history is known up to the position of the last slow step, also where nobody saw anything.
    last = tl.load(position + queries - 1).to(tl.int32)
    known = tl.where(tokens > 0, last + 1 - tokens, 0).to(tl.int32)
    until = length
    if keeps:
        until = tl.where(length > 0, tl.maximum(length, tl.minimum(last + 1, size)), 0)
    if first * block >= until:
        return
    head, own_head = (b * heads + h).to(tl.int64), (row * heads + h).to(tl.int64)
    # As distances from `worth`, which is float32, as they are.
    logits = at(inputs, site, worth, aligned) + row.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    lse = at(inputs, sites + site, worth, aligned) + own_head * rows
    norms = at(inputs, 2 * sites + site, worth, aligned) + own_head * size
    history = worth
    if keeps:
        history = at(inputs, 3 * sites + site, worth, aligned) + own_head * size
    left = tl.where(tokens == 0, 0.0, tl.exp2(tokens.to(tl.float32) * log_fading) * per_step)
    if first == 0:
        tl.store(bins + head * n_bins + tl.arange(0, n_bins), tl.zeros([n_bins], tl.int32))
        tl.store(listed + head, 0)
    for chunk in tl.range(first, tl.minimum(first + per, tl.cdiv(until, block)), num_stages=stages):
        t = chunk * block + tl.arange(0, block)
        read = t < read_until(length, size)
        total = tl.zeros([block], tl.float32)
        for r0 in range(0, rows, block_r):
            r = r0 + tl.arange(0, block_r)
            z = tl.load(lse + r, r < rows, other=NEG_INF)[:, None]
            x = tl.load(
                logits + r.to(tl.int64)[:, None] * stride_r + t[None, :],
                (r < rows)[:, None] & read[None, :],
                other=NEG_INF,
                eviction_policy="evict_first",  # not read again
            )
            total += tl.sum(tl.where(z == NEG_INF, 0.0, exp2((x - z) * LOG2E, fast)), 0)
        total = tl.where((t < length) & (found <= SHORT), total, 0.0)
        if keeps:
            past = tl.load(history + t, t < read_until(until, size), other=0.0)
            total += tl.where(t < known, left * past, 0.0)
            tl.store(history + t, total, t < until)
        if by_value:
            norm = exp2(tl.load(norms + t, read, other=0.0) * LOG2E, fast)
            # What nobody may attend to has got nothing, and its norm may be anything.
            total = tl.where(total > 0.0, total * norm, 0.0)
        tl.store(worth + head * size + t, total, read)


@triton.jit
def load_fours(worth, four, length, size, behind: tl.constexpr, inside: tl.constexpr):
    """The four columns of the runs of four positions that lie `behind` runs before some; zeros outside.

    `inside`: nothing lies outside.
    """
    t = (four - behind)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if inside:
        x = tl.load(worth + t)
    else:
        x = tl.load(worth + t, (t >= 0) & (t < read_until(length, size)), other=0.0)
        x = tl.where(t < length, x, 0.0)
    return split_fours(x[:, None, :])


@triton.jit
def largest_before(worth, four, length, size, ahead: tl.constexpr, decay: tl.constexpr, inside: tl.constexpr):
    """`max(decay^e * worth(t - e))`, e from 0 to `ahead`, at each of the four positions t of some runs.

    Runs that all four look back on as a whole are looked at once.
    """
    x0, x1, x2, x3 = load_fours(worth, four, length, size, 0, inside)
    best0, best1, best2, best3 = x0, x1, x2, x3
    d1: tl.constexpr = decay
    d2: tl.constexpr = decay * decay
    d3: tl.constexpr = decay * decay * decay
    if ahead >= 1:
        best1, best2, best3 = tl.maximum(x1, x0 * d1), tl.maximum(x2, x1 * d1), tl.maximum(x3, x2 * d1)
    if ahead >= 2:
        best2, best3 = tl.maximum(best2, x0 * d2), tl.maximum(best3, x1 * d2)
    if ahead >= 3:
        best3 = tl.maximum(best3, x0 * d3)
    whole: tl.constexpr = (ahead - 3) // 4
    if whole > 0:
        every = tl.zeros_like(x0)
        for j in tl.static_range(1, whole + 1):
            y0, y1, y2, y3 = load_fours(worth, four, length, size, j, inside)
            # As the first of the four sees it, which is 4 j positions after y0.
            near = tl.maximum(tl.maximum(y3, y2 * d1), tl.maximum(y1 * d2, y0 * d3))
            every = tl.maximum(every, near * (decay ** (4 * j - 3)))
        best0, best1 = tl.maximum(best0, every), tl.maximum(best1, every * d1)
        best2, best3 = tl.maximum(best2, every * d2), tl.maximum(best3, every * d3)
    for j in tl.static_range(max(whole, 0) + 1, (ahead + 3) // 4 + 1):
        y0, y1, y2, y3 = load_fours(worth, four, length, size, j, inside)
        # Column k is 4 j + c - k positions before column c.
        best0 = if_near(best0, y0, 4 * j, ahead, decay)
        best0 = if_near(best0, y1, 4 * j - 1, ahead, decay)
        best0 = if_near(best0, y2, 4 * j - 2, ahead, decay)
        best0 = if_near(best0, y3, 4 * j - 3, ahead, decay)
        best1 = if_near(best1, y0, 4 * j + 1, ahead, decay)
        best1 = if_near(best1, y1, 4 * j, ahead, decay)
        best1 = if_near(best1, y2, 4 * j - 1, ahead, decay)
        best1 = if_near(best1, y3, 4 * j - 2, ahead, decay)
        best2 = if_near(best2, y0, 4 * j + 2, ahead, decay)
        best2 = if_near(best2, y1, 4 * j + 1, ahead, decay)
        best2 = if_near(best2, y2, 4 * j, ahead, decay)
        best2 = if_near(best2, y3, 4 * j - 1, ahead, decay)
        best3 = if_near(best3, y0, 4 * j + 3, ahead, decay)
        best3 = if_near(best3, y1, 4 * j + 2, ahead, decay)
        best3 = if_near(best3, y2, 4 * j + 1, ahead, decay)
        best3 = if_near(best3, y3, 4 * j, ahead, decay)
    even, odd = tl.join(best0, best2), tl.join(best1, best3)
    return tl.reshape(tl.join(even, odd), [four.shape[0], 4])


@triton.jit
def if_near(best, x, e: tl.constexpr, ahead: tl.constexpr, decay: tl.constexpr):
    """With what is e positions before, if that is near enough."""
    if e <= ahead:
        best = tl.maximum(best, x * (decay**e))
    return best


@triton.jit
def carry_block(
    worth, log_position, keys, b, h, batch, size, places, heads, weight, length,
    ahead: tl.constexpr, decay: tl.constexpr, carries: tl.constexpr, inside: tl.constexpr, block: tl.constexpr,
    fast: tl.constexpr,
):  # fmt: skip
    """What `carry` writes of this program's positions; `inside`: they, and those before that matter, are in the row."""
    four = tl.program_id(0) * (block // 4) + tl.arange(0, block // 4)
    t = four[:, None] * 4 + tl.arange(0, 4)[None, :]
    read = t < read_until(length, size)
    place_at = log_position + (b % batch).to(tl.int64) * places + t
    worth += (b * heads + h).to(tl.int64) * size
    keys += (b * heads + h).to(tl.int64) * size
    if inside:
        place, x = tl.load(place_at), tl.load(worth + t)
    else:
        place, x = tl.load(place_at, t < length, other=NEG_INF), tl.load(worth + t, read, other=0.0)
    if carries:
        x += weight * largest_before(worth, four, length, size, ahead, decay, inside)
    key = key_of(log2(tl.maximum(x * SCALE, LEAST), fast), place)
    if inside:
        tl.store(keys + t, key)
    else:
        tl.store(keys + t, key, read)


@triton.jit
def carry(
    worth, log_position, slow_rows, status, extent, keys, batch, size, places, heads, weight,
    ahead: tl.constexpr, decay: tl.constexpr, carries: tl.constexpr, block: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    """Keys [sites * B, H, N] of `worth(t) + weight * max(decay^e * worth(t - e))`, e from 0 to `ahead`."""
    h, b = tl.program_id(1), tl.program_id(2)
    length = length_of(slow_rows, status, extent, b % batch)
    if tl.program_id(0) * block >= length:
        return
    # Most programs lie whole in the row, with all that they look back on: bounds cost as much as the rest of the work.
    first = tl.program_id(0) * block
    if (first >= (ahead + 3) // 4 * 4) & (first + block <= length):
        carry_block(
            worth, log_position, keys, b, h, batch, size, places, heads, weight, length,
            ahead, decay, carries, True, block, fast,
        )  # fmt: skip
    else:
        carry_block(
            worth, log_position, keys, b, h, batch, size, places, heads, weight, length,
            ahead, decay, carries, False, block, fast,
        )  # fmt: skip
