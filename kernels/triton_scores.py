"""Triton source of the selector's scores: evidence, fusion with the prior, and refinement.

Three kernels in turn, over chunks of positions. The last axis of the grid, b, is the row of the batch of one of several
sites, site by site; what belongs to a row of the batch is at `b % batch`. Of what the sites have in tensors of their
own, `inputs` holds the addresses: logits, then log-sum-exps, then log-norms. `size` is the places of a row of those and
of what is made here, `places` those of a row of `log_position`.

    evidence   logits → log of the power mean over the rows of a head, and what fusion needs of each chunk (PARTIALS)
    weigh      the weights of evidence and prior per head, from all chunks
    refine     mean and prior → refined scores as integer keys, of all heads at once

For windows of suppression too wide for a tile, `blend`, several times `widen`, and `refine_wide` take its place.
Logarithms are to base 2. Whatever is summed in floating point is summed in a fixed order. A row that does not refresh
has length zero: its programs, and those past the end of any row, return at once. Imports triton, `triton_addresses` and
`triton_positions`; `select_cuda.py` launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfi_compile.kernels.triton_addresses import at
from sfi_compile.kernels.triton_positions import (
    LOG2E,
    NEG_INF,
    exp2,
    key_of,
    length_of,
    log2,
    read_until,
    split_fours,
)

ZERO = tl.constexpr(-1e20)
"""The logarithm of nothing. It is finite, so that it cancels where it must: minus infinity would give NaN."""
PARTIALS = tl.constexpr(8)
"""Per chunk, places 0 to 4: the sums of f, r, f², fr and r², scaled to a largest f and r of one; 5 and 6: the logs of
these; 7 is not used."""


@triton.jit
def tile_index(block: tl.constexpr, block_h: tl.constexpr):
    """Columns [block / 4, 1, 4] and heads [1, block_h, 1] of a tile: four columns to a thread, with all their heads."""
    column = tl.arange(0, block // 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    return column, tl.arange(0, block_h)[None, :, None]


@triton.jit
def log_mean(
    logits, lse, t, read, uniform, stride_r, alpha, per_alpha,
    rows: tl.constexpr, block_r: tl.constexpr, block: tl.constexpr, geometric: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    """Log of the power mean over the rows at positions t. What all positions share, the renormalisation takes out."""
    largest = tl.full([block], ZERO, tl.float32)
    total = tl.zeros([block], tl.float32)
    for r0 in range(0, rows, block_r):
        r = r0 + tl.arange(0, block_r)
        real = r < rows
        z = tl.load(lse + r, real, other=0.0)[:, None]
        x = tl.load(
            logits + r.to(tl.int64)[:, None] * stride_r + t[None, :],
            real[:, None] & read[None, :],
            other=NEG_INF,
            eviction_policy="evict_first",  # not read again, unlike norms and means
        )
        log_p = tl.where(z == NEG_INF, uniform, x - z)
        if geometric:
            total += tl.sum(tl.where(real[:, None], log_p, 0.0), 0)
        else:
            peak = tl.maximum(largest, tl.max(log_p, 0))
            if rows > block_r:
                total *= exp2((largest - peak) * (alpha * LOG2E), fast)
            total += tl.sum(exp2((log_p - peak[None, :]) * (alpha * LOG2E), fast), 0)
            largest = peak
    if geometric:
        found = total * (LOG2E / rows)
    else:
        found = largest * LOG2E + log2(total, fast) * per_alpha
    return found


@triton.jit
def evidence(
    inputs, log_position, slow_rows, status, extent, mean, partials, bins, listed,
    batch, sites, size, places, chunks, stride_b, stride_h, stride_r, norm_scale, alpha, per_alpha,
    aligned: tl.constexpr, heads: tl.constexpr, rows: tl.constexpr, block_r: tl.constexpr, block: tl.constexpr,
    geometric: tl.constexpr, n_bins: tl.constexpr, fast: tl.constexpr, per: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Log of the power mean over the rows, the partial sums of each chunk, and zero in what is counted later.

    A program takes `per` chunks, reading the next while it works on one.
    """
    first, h, b = tl.program_id(0) * per, tl.program_id(1), tl.program_id(2)
    site, row = b // batch, b % batch
    logits, lse = at(inputs, site, mean, aligned), at(inputs, sites + site, mean, aligned)
    log_norm = at(inputs, 2 * sites + site, mean, aligned)
    length = length_of(slow_rows, status, extent, row)
    if first * block >= length:
        return
    head, own_head = (b * heads + h).to(tl.int64), (row * heads + h).to(tl.int64)
    logits += row.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    lse += own_head * rows
    log_norm += own_head * size
    log_position += row.to(tl.int64) * places
    uniform = -tl.log(length.to(tl.float32))
    if first == 0:
        tl.store(bins + head * n_bins + tl.arange(0, n_bins), tl.zeros([n_bins], tl.int32))
        tl.store(listed + head, 0)
    for chunk in tl.range(first, tl.minimum(first + per, tl.cdiv(length, block)), num_stages=stages):
        t = chunk * block + tl.arange(0, block)
        read = t < read_until(length, size)
        place = tl.load(log_position + t, t < length, other=NEG_INF)
        norm = tl.load(log_norm + t, read, other=0.0)
        log_f = log_mean(
            logits, lse, t, read, uniform, stride_r, alpha, per_alpha, rows, block_r, block, geometric, fast
        )
        log_f = tl.where(place > NEG_INF, tl.maximum(log_f, ZERO), ZERO)
        log_r = tl.where(place > NEG_INF, place * LOG2E - norm * (norm_scale * LOG2E), ZERO)
        tl.store(mean + head * size + t, log_f, read)

        # Two reductions over the chunk, not seven.
        tops = tl.max(tl.join(log_f, log_r), 0)
        top_f, top_r = tl.split(tops)
        f, r = exp2(log_f - top_f, fast), exp2(log_r - top_r, fast)
        one, two = tl.join(tl.join(f, r * r), tl.join(f * f, f)), tl.join(tl.join(r, f), tl.join(f * r, f))
        sums = tl.sum(tl.join(one, two), 0)
        to = partials + (head * chunks + chunk) * PARTIALS
        slot = tl.arange(0, 2)[:, None, None] * 4 + tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(to + slot, sums, slot < 5)
        tl.store(to + 5, top_f)
        tl.store(to + 6, top_r)


@triton.jit
def weigh(
    partials, slow_rows, status, extent, weights, batch, chunks, heads, clip,
    chunk: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """`weights` [sites * B, 2, H]: what to add to log f and to log r before they are mixed.

    Renormalisation and the weights 1 - λ and λ in one, λ from the partial sums of all chunks.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    length = length_of(slow_rows, status, extent, b % batch)
    if length == 0:
        return
    used = tl.cdiv(length, chunk)
    partials += (b * heads + h).to(tl.int64) * chunks * PARTIALS
    highest_f = tl.full([block_c], ZERO, tl.float32)
    highest_r = tl.full([block_c], ZERO, tl.float32)
    for c0 in range(0, used, block_c):
        c = c0 + tl.arange(0, block_c)
        highest_f = tl.maximum(highest_f, tl.load(partials + c * PARTIALS + 5, c < used, other=ZERO))
        highest_r = tl.maximum(highest_r, tl.load(partials + c * PARTIALS + 6, c < used, other=ZERO))
    top_f, top_r = tl.max(highest_f, 0), tl.max(highest_r, 0)
    f = tl.zeros([block_c], tl.float32)
    r = tl.zeros([block_c], tl.float32)
    ff = tl.zeros([block_c], tl.float32)
    fr = tl.zeros([block_c], tl.float32)
    rr = tl.zeros([block_c], tl.float32)
    for c0 in range(0, used, block_c):
        c = c0 + tl.arange(0, block_c)
        of_f = tl.exp2(tl.load(partials + c * PARTIALS + 5, c < used, other=ZERO) - top_f)
        of_r = tl.exp2(tl.load(partials + c * PARTIALS + 6, c < used, other=ZERO) - top_r)
        f += of_f * tl.load(partials + c * PARTIALS, c < used, other=0.0)
        r += of_r * tl.load(partials + c * PARTIALS + 1, c < used, other=0.0)
        ff += of_f * of_f * tl.load(partials + c * PARTIALS + 2, c < used, other=0.0)
        fr += of_f * of_r * tl.load(partials + c * PARTIALS + 3, c < used, other=0.0)
        rr += of_r * of_r * tl.load(partials + c * PARTIALS + 4, c < used, other=0.0)
    f_sum, r_sum = tl.sum(f, 0), tl.sum(r, 0)  # they have a term of one
    f2, fr, r2 = tl.sum(ff, 0) / (f_sum * f_sum), tl.sum(fr, 0) / (f_sum * r_sum), tl.sum(rr, 0) / (r_sum * r_sum)
    distance = f2 - 2.0 * fr + r2
    share = tl.where(distance > 0.0, (f2 - fr) / distance, 0.0)
    # Evidence that is nothing at all candidates stays so.
    some = top_f > ZERO
    share = tl.where(some, tl.minimum(tl.maximum(share, 0.0), clip), 0.0)
    weights += b * 2 * heads + h
    tl.store(weights, tl.where(some, tl.log2(1.0 - share) - tl.log2(f_sum) - top_f, 0.0))
    tl.store(weights + heads, tl.log2(share) - tl.log2(r_sum) - top_r)


@triton.jit
def load_weights(weights, b, heads: tl.constexpr, block_h: tl.constexpr):
    """What `weigh` found, [block_h] each."""
    h = tl.arange(0, block_h)
    weights += b * 2 * heads
    return tl.load(weights + h, h < heads, other=0.0), tl.load(weights + heads + h, h < heads, other=0.0)


@triton.jit
def load_terms(
    mean, inputs, log_position, b, t, h, length, batch, sites, size, places,
    aligned: tl.constexpr, heads: tl.constexpr, block_h: tl.constexpr,
):  # fmt: skip
    """What `blended` takes, at positions t of heads h: log f but for a constant, places, and norms."""
    read = (t >= 0) & (t < read_until(length, size))
    row = b % batch
    place = tl.load(log_position + row.to(tl.int64) * places + t, (t >= 0) & (t < length), other=NEG_INF)
    if heads < block_h:
        read = read & (h < heads)
    x = tl.load(mean + (b * heads).to(tl.int64) * size + (h * size + t), read, other=ZERO)
    log_norm = at(inputs, 2 * sites + b // batch, mean, aligned)
    return x, place, tl.load(log_norm + (row * heads).to(tl.int64) * size + (h * size + t), read, other=0.0)


@triton.jit
def blended(x, place, norm, add_f, add_r, norm_scale, fast: tl.constexpr):
    """Log s. Off the candidates ZERO, less, or -inf."""
    x += add_f[None, :, None]
    y = place * LOG2E + add_r[None, :, None] - norm * (norm_scale * LOG2E)
    # Keys off the candidates may be anything, so y may be NaN there: the larger of a number and NaN is the number.
    return tl.maximum(x, y) + log2(1.0 + exp2(tl.maximum(-tl.abs(x - y), -126.0), fast), fast)


@triton.jit
def keys_of(
    log_s, peak, place, h, nms_alpha, cross_alpha, per_temperature,
    heads: tl.constexpr, block_h: tl.constexpr, exclusive: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    """Refined scores from blended ones and their windowed maxima, as keys: int32, in their order. Heads on axis 1."""
    x = log_s - nms_alpha * (peak - log_s)
    if exclusive:
        y = x * per_temperature
        if heads < block_h:
            y = tl.where(h < heads, y, NEG_INF)
        y -= tl.max(y, 1, keep_dims=True)
        x += cross_alpha * (y - log2(tl.sum(exp2(y, fast), 1, keep_dims=True), fast))
    return key_of(x, place)


@triton.jit
def fours_max(first, between, last):
    """For each of four columns: the maximum of the rest of `first` from it on, `between`, and `last` up to it."""
    a0, a1, a2, a3 = split_fours(first)
    z0, z1, z2, z3 = split_fours(last)
    a3 = tl.maximum(a3, between)
    a2 = tl.maximum(a2, a3)
    a1 = tl.maximum(a1, a2)
    a0 = tl.maximum(a0, a1)
    z1 = tl.maximum(z0, z1)
    z2 = tl.maximum(z1, z2)
    z3 = tl.maximum(z2, z3)
    even = tl.join(tl.maximum(a0, z0), tl.maximum(a2, z2))
    odd = tl.join(tl.maximum(a1, z1), tl.maximum(a3, z3))
    return tl.reshape(tl.join(even, odd), first.shape)


@triton.jit
def refine(
    mean, inputs, log_position, weights, slow_rows, status, extent, staged, keys,
    batch, sites, size, places, norm_scale, nms_alpha, cross_alpha, per_temperature, aligned: tl.constexpr,
    heads: tl.constexpr, radius: tl.constexpr, block: tl.constexpr, block_h: tl.constexpr, exclusive: tl.constexpr,
    fast: tl.constexpr,
):  # fmt: skip
    """Keys of a tile of positions, but for `radius` of them at either end, which are there for the windowed maxima.

    Threads see each other's positions through `staged` [sites * B, tiles]: all columns, and the maximum of each four.
    The window of the position at column i + radius is columns i to i + 2 radius: the rest of the four that i is in,
    fours, the beginning of a four, and two more if the radius is odd.
    """
    tile, b = tl.program_id(0), tl.program_id(1)
    row = b % batch
    length = length_of(slow_rows, status, extent, row)
    start = tile * (block - 2 * radius)
    # Keys are read in whole vectors, past the length; what is there is no candidate.
    if start >= read_until(length, size):
        return
    i, h = tile_index(block, block_h)
    t = start - radius + i
    x, place, norm = load_terms(
        mean, inputs, log_position, b, t, h, length, batch, sites, size, places, aligned, heads, block_h
    )
    add_f, add_r = load_weights(weights, b, heads, block_h)
    log_s = blended(x, place, norm, add_f, add_r, norm_scale, fast)
    peak = log_s
    if radius > 0:
        four = tl.arange(0, block // 4)[:, None]
        own = staged + (b * tl.num_programs(0) + tile).to(tl.int64) * (heads * block + block_h * (block // 4))
        fours = own + heads * block + tl.arange(0, block_h)[None, :]
        own += h * block
        tl.store(fours + four * block_h, tl.max(log_s, 2))
        tl.store(own + i, log_s, h < heads)
        tl.debug_barrier()
        whole: tl.constexpr = radius // 2
        if whole > 0:
            between = tl.full([block // 4, block_h], NEG_INF, tl.float32)
            for j in tl.static_range(1, whole):
                more = tl.load(fours + (four + j) * block_h, four < block // 4 - j, other=NEG_INF)
                between = tl.maximum(between, more)
            begins = tl.load(own + (i + 4 * whole), (h < heads) & (i < block - 4 * whole), other=NEG_INF)
            peak = fours_max(log_s, between, begins)
        if radius % 2 == 1:
            for j in tl.static_range(2 * radius - 1, 2 * radius + 1):
                peak = tl.maximum(peak, tl.load(own + (i + j), (h < heads) & (i < block - j), other=NEG_INF))
        log_s = tl.load(own + (i + radius), (h < heads) & (i < block - radius), other=ZERO)
    t = start + i
    inside = (i < block - 2 * radius) & (t < read_until(length, size))
    place = tl.load(log_position + row.to(tl.int64) * places + t, inside & (t < length), other=NEG_INF)
    key = keys_of(log_s, peak, place, h, nms_alpha, cross_alpha, per_temperature, heads, block_h, exclusive, fast)
    tl.store(keys + (b * heads).to(tl.int64) * size + (h * size + t), key, (h < heads) & inside)


@triton.jit
def blend(
    mean, inputs, log_position, weights, slow_rows, status, extent, log_s,
    batch, sites, size, places, norm_scale, aligned: tl.constexpr,
    heads: tl.constexpr, block: tl.constexpr, block_h: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    """Log s [sites * B, H, N], for windows too wide for `refine`."""
    b = tl.program_id(1)
    length = length_of(slow_rows, status, extent, b % batch)
    if tl.program_id(0) * block >= length:
        return
    column, h = tile_index(block, block_h)
    t = tl.program_id(0) * block + column
    x, place, norm = load_terms(
        mean, inputs, log_position, b, t, h, length, batch, sites, size, places, aligned, heads, block_h
    )
    add_f, add_r = load_weights(weights, b, heads, block_h)
    found = blended(x, place, norm, add_f, add_r, norm_scale, fast)
    tl.store(log_s + (b * heads).to(tl.int64) * size + (h * size + t), found, (h < heads) & (t < length))


@triton.jit
def widen(x, out, slow_rows, status, extent, batch, size, heads, by, block: tl.constexpr):
    """One step of a windowed maximum: `max(x[t - by], x[t], x[t + by])`.

    It triples windows that just touch. An index outside is clamped: its window is then within the one sought, and what
    that leaves out does not exist.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    length = length_of(slow_rows, status, extent, b % batch)
    if tl.program_id(0) * block >= length:
        return
    t = tl.program_id(0) * block + tl.arange(0, block)
    inside = t < length
    x += (b * heads + h).to(tl.int64) * size
    left = tl.load(x + tl.maximum(t - by, 0), inside)
    right = tl.load(x + tl.minimum(t + by, length - 1), inside)
    found = tl.maximum(tl.load(x + t, inside), tl.maximum(left, right))
    tl.store(out + (b * heads + h).to(tl.int64) * size + t, found, inside)


@triton.jit
def refine_wide(
    log_s, peak, log_position, slow_rows, status, extent, keys,
    batch, size, places, nms_alpha, cross_alpha, per_temperature,
    heads: tl.constexpr, block: tl.constexpr, block_h: tl.constexpr, exclusive: tl.constexpr, fast: tl.constexpr,
):  # fmt: skip
    """`refine` from blended scores and windowed maxima that are there already. `keys` may be `peak`'s memory."""
    b = tl.program_id(1)
    length = length_of(slow_rows, status, extent, b % batch)
    if tl.program_id(0) * block >= length:
        return
    column, h = tile_index(block, block_h)
    t = tl.program_id(0) * block + column
    place = tl.load(log_position + (b % batch).to(tl.int64) * places + t, t < length, other=NEG_INF)
    first = (b * heads).to(tl.int64) * size + (h * size + t)
    real = (h < heads) & (t < length)
    x, top = tl.load(log_s + first, real, other=ZERO), tl.load(peak + first, real, other=ZERO)
    key = keys_of(x, top, place, h, nms_alpha, cross_alpha, per_temperature, heads, block_h, exclusive, fast)
    tl.store(keys + first, key, (h < heads) & (t < read_until(length, size)))
