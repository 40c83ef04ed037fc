"""Triton source of the slow step's attention: dense decode over the cache, split along the context.

Two kernels: `split`, whose programs each take one run of tokens of one KV head of one slow row, and `merge`, which
brings the runs of a head together. How the contexts are shared out is decided on the device (`share`), since only there
is it known which rows are slow and how long they are. The kernels are thin: what they do is in functions that the
Inductor templates of the same names call as well. Imports triton only; `dense_decode.py` launches.

Rows of a tile are the query heads of the group times the queries of the step, head first; t counts tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
NORM_FLOOR_SQUARED = tl.constexpr(1e-12)


@triton.jit
def share(
    slow_rows, extent, batch, size, tiles_of, max_splits, programs, block_batch: tl.constexpr, block_n: tl.constexpr
):
    """How the contexts are shared out: for each row its length, its splits, and the tiles of each split.

    `programs` is how many fill the device once. Slow rows get them in proportion to their lengths, rounded down, so
    that all run at once; where there are so many heads that few or no splits are left, tokens are split finer, and the
    device evens it out. A row that is not slow has no splits. `tiles_of`: programs that read one tile (KV heads, times
    the blocks of query rows).
    """
    every = tl.arange(0, block_batch)
    flags = tl.load(slow_rows + every, mask=every < batch, other=0).to(tl.int1)
    ends = tl.load(extent + 3 * every + 1, mask=every < batch, other=0)
    length = tl.where(flags, tl.minimum(ends, size), 0).to(tl.int32)
    tiles = (length + block_n - 1) // block_n
    heads = tl.sum((tiles > 0).to(tl.int32), 0) * tiles_of
    wanted = tl.where(2 * heads > programs, 4 * programs, programs)
    total = tl.maximum(tl.sum(tiles, 0) * tiles_of, 1)
    splits = (tiles.to(tl.int64) * wanted // total).to(tl.int32)
    splits = tl.maximum(tl.minimum(splits, max_splits), 1)
    each = tl.maximum((tiles + splits - 1) // splits, 1)
    return length, (tiles + each - 1) // each, each


@triton.jit
def pitch_of(size):
    """Places of a row of logits or norms: a multiple of 16, so that whole vectors are stored and loaded."""
    return (size + 15) // 16 * 16


@triton.jit
def at_row(values, row, block_batch: tl.constexpr):
    """One of the values [block_batch]; 0 past them."""
    return tl.sum(tl.where(tl.arange(0, block_batch) == row, values, 0), 0)


@triton.jit
def place(
    slow_rows, extent, batch, kv_heads, size, max_splits, programs,
    blocks: tl.constexpr, block_batch: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """This program's work: row, KV head of all rows, block of query rows, split, and tokens [first, last).

    A row of `batch` or more: there is none.
    """
    tiles_of = kv_heads * blocks
    lengths, splits, tiles = share(slow_rows, extent, batch, size, tiles_of, max_splits, programs, block_batch, block_n)
    ends = tl.cumsum(splits * tiles_of, 0)
    number = tl.program_id(0)
    row = tl.sum((ends <= number).to(tl.int32), 0)
    number -= at_row(ends - splits * tiles_of, row, block_batch)
    index = number // tiles_of
    tokens = at_row(tiles, row, block_batch) * block_n
    last = tl.minimum((index + 1) * tokens, at_row(lengths, row, block_batch))
    return row, row * kv_heads + number % tiles_of // blocks, number % blocks, index, index * tokens, last


@triton.jit
def capped(x, softcap):
    """`softcap * tanh(x / softcap)`; a series near zero, where the quotient of exponentials cancels."""
    y = x / softcap
    square = y * y
    near = y * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    small = tl.exp2(tl.abs(y) * (-2 * LOG2E))
    far = (1.0 - small) / (1.0 + small)
    return softcap * tl.where(tl.abs(y) < 0.25, near, tl.where(y < 0, -far, far))


@triton.jit
def hidden(x):
    """The number, which the compiler cannot know: where it knows the factor of the logits, what it makes of the loop of
    `attend` takes 2.5 % longer (H200, Triton 3.6)."""
    return tl.where(tl.program_id(0) > 0x7FFFFFF0, 0.0, x)


@triton.jit
def log2(x, on_device: tl.constexpr):
    """One instruction, right to 2^-22, instead of a polynomial; the interpreter does not know it."""
    if on_device:
        y = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def log_norms(keys, block_n: tl.constexpr, block_k: tl.constexpr, on_device: tl.constexpr):
    """Log of the norms of keys or values [tokens, width], in float32."""
    if keys.dtype.primitive_bitwidth == 16 and block_k <= 128:
        # Squares on tensor cores, which hold these products exactly: the diagonals of 16 keys times 16 keys. Beside
        # everything else that a tile takes, squares one by one would take longer than the memory does. Wider keys would
        # need more registers than there are.
        by_16 = tl.reshape(keys, [block_n // 16, 16, block_k])
        products = tl.dot(by_16, tl.permute(by_16, (0, 2, 1)))
        i = tl.arange(0, 16)
        # A select, so that a key that is not finite stays alone.
        square = tl.sum(tl.where((i[:, None] == i[None, :])[None], products, 0.0), 2)
        square = tl.reshape(square, [block_n])
    else:
        wide = keys.to(tl.float32)
        square = tl.sum(wide * wide, 1)
    return log2(tl.maximum(square, NORM_FLOOR_SQUARED), on_device) * (0.5 * LN2)


@triton.jit
def load_mask(mask, base, t, inside, row_offsets, row_inside, stride_t, by_row: tl.constexpr, is_bool: tl.constexpr):
    """A tile of the mask, [1 or rows, tokens]; nothing is allowed outside."""
    if by_row:
        at = base + row_offsets[:, None] + t.to(tl.int64)[None, :] * stride_t
        inside = row_inside[:, None] & inside[None, :]
    else:
        at = (base + t.to(tl.int64) * stride_t)[None, :]
        inside = inside[None, :]
    if is_bool:
        tile = tl.load(mask + at, mask=inside, other=0).to(tl.int1)
    else:
        tile = tl.load(mask + at, mask=inside, other=NEG_INF).to(tl.float32)
    return tile


@triton.jit
def blocked_logit(extent, row, fill: tl.constexpr):
    """What blocked logits of a row become: `fill` where the third column of its extent says that it has a say."""
    return tl.where(tl.load(extent + 3 * row + 2) > 0, fill, NEG_INF)


@triton.jit
def attend(
    q, k, v, mask, logits, log_norm,
    q_b, q_h, q_q, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_h, mask_q, mask_t,
    head, block, first, last, kv_heads, size, scale, softcap, blocked, has_fill: tl.constexpr,
    norm_of_values: tl.constexpr,
    queries: tl.constexpr, rows: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    has_softcap: tl.constexpr, mask_by_row: tl.constexpr, mask_is_bool: tl.constexpr, on_device: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Attention of a block of query rows over the tokens [first, last) of a KV head; writes their logits, and norms of
    the keys, or of the values.

    Logits that the mask blocks by False or -inf become `blocked`, which is -inf without `has_fill`.

    Returns the sum of weighted values [block_m, block_v], the largest logit and the sum of weights, both [block_m]. The
    first is NaN where a masked value is not finite.
    """
    b, h = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    m = block * block_m + tl.arange(0, block_m)
    n = tl.arange(0, block_n)
    dk, dv = tl.arange(0, block_k), tl.arange(0, block_v)
    heads_of_group: tl.constexpr = rows // queries
    q_head, query = h * heads_of_group + m // queries, m % queries
    q_at = (b * q_b + q_head * q_h + query * q_q)[:, None] + dk[None, :] * q_d
    q_tile = tl.load(q + q_at, mask=(m < rows)[:, None] & (dk < key_dim)[None, :], other=0.0)
    mask_base, mask_rows = b * mask_b, q_head * mask_h + query * mask_q
    k_at, v_at = n[:, None] * k_t + dk[None, :] * k_d, n[:, None] * v_t + dv[None, :] * v_d
    k_here = k + b * k_b + h * k_h + first.to(tl.int64) * k_t
    v_here = v + b * v_b + h * v_h + first.to(tl.int64) * v_t
    pitch = pitch_of(size)
    scale = hidden(scale)
    logits_base = logits + head.to(tl.int64) * rows * pitch
    norm_base = log_norm + head.to(tl.int64) * pitch

    largest = tl.full([block_m], NEG_INF, tl.float32)
    total = tl.zeros([block_m, block_n], tl.float32)
    out = tl.zeros([block_m, block_v], tl.float32)
    # The mask is read a tile ahead: its loads are too narrow for the asynchronous copies that bring keys and values.
    t = first + n
    ahead = load_mask(mask, mask_base, t, t < last, mask_rows, m < rows, mask_t, mask_by_row, mask_is_bool)
    for start in tl.range(first, last, block_n):
        inside = start + n < last
        allowed = ahead
        t = start + block_n + n
        ahead = load_mask(mask, mask_base, t, t < last, mask_rows, m < rows, mask_t, mask_by_row, mask_is_bool)

        key_inside = inside[:, None]
        if key_dim != block_k:
            key_inside = key_inside & (dk < key_dim)[None, :]
        k_tile = tl.load(k_here + k_at, mask=key_inside, other=0.0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if has_softcap:
            x = capped(x, softcap)
        # What is masked may hold anything, NaN included.
        if mask_is_bool:
            x = tl.where(allowed, x, blocked)
        else:
            x = tl.where(allowed != NEG_INF, x + allowed, blocked)
        if has_fill:
            x = tl.where(inside[None, :], x, NEG_INF)
        # To the end of the tile, so that whether a store is wanted does not change within a vector.
        written = start + n < pitch
        at = logits_base + m[:, None] * pitch + (start + n)[None, :]
        tl.store(at, x, mask=(m < rows)[:, None] & written[None, :])
        if block == 0 and not norm_of_values:
            tl.store(norm_base + start + n, log_norms(k_tile, block_n, block_k, on_device), mask=written)

        before = largest
        largest = tl.maximum(before, tl.max(x, 1))
        shift = tl.where(largest == NEG_INF, 0.0, largest)
        fade = tl.exp2((before - shift) * LOG2E)
        weights = tl.exp2((x - shift[:, None]) * LOG2E)
        total = total * fade[:, None] + weights
        value_inside = inside[:, None]
        if value_dim != block_v:
            value_inside = value_inside & (dv < value_dim)[None, :]
        v_tile = tl.load(v_here + v_at, mask=value_inside, other=0.0)
        if block == 0 and norm_of_values:
            tl.store(norm_base + start + n, log_norms(v_tile, block_n, block_v, on_device), mask=written)
        out = tl.dot(weights.to(v_tile.dtype), v_tile, out * fade[:, None], input_precision="ieee")
        k_here += block_n * k_t
        v_here += block_n * v_t
    return out, largest, tl.sum(total, 1)


@triton.jit(do_not_specialize=["batch", "kv_heads", "max_splits", "programs"])
def split(
    q, k, v, mask, slow_rows, extent, partial, logits, log_norm,
    q_b, q_h, q_q, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_h, mask_q, mask_t,
    batch, kv_heads, size, max_splits, programs, scale, softcap,
    queries: tl.constexpr, rows: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, width: tl.constexpr,
    has_softcap: tl.constexpr, has_fill: tl.constexpr, fill: tl.constexpr, norm_of_values: tl.constexpr,
    mask_by_row: tl.constexpr, mask_is_bool: tl.constexpr, on_device: tl.constexpr,
    block_batch: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """`attend` for each split of each KV head of the slow rows.

    Grid: (programs, or four times as many where there are many heads, + B * Hkv * blocks of query rows,).

    Writes, where there is work and nowhere else, contiguous float32: partial [B * Hkv, max_splits, rows, width], which
    is the weighted values, then from column width - 4 the largest logit and the sum of weights; logits
    [B, Hkv, rows, pitch] and log_norm [B, Hkv, pitch].
    """
    blocks: tl.constexpr = (rows + block_m - 1) // block_m
    row, head, block, index, first, last = place(
        slow_rows, extent, batch, kv_heads, size, max_splits, programs, blocks, block_batch, block_n
    )
    if row >= batch:
        return
    blocked = NEG_INF
    if has_fill:
        # Elsewhere it has no weight, and no more than that may be read.
        blocked = blocked_logit(extent, row, fill)
    out, largest, total = attend(
        q, k, v, mask, logits, log_norm,
        q_b, q_h, q_q, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, mask_b, mask_h, mask_q, mask_t,
        head, block, first, last, kv_heads, size, scale, softcap, blocked, has_fill, norm_of_values,
        queries, rows, key_dim, value_dim, has_softcap, mask_by_row, mask_is_bool, on_device,
        block_m, block_n, block_k, block_v,
    )  # fmt: skip
    m, dv = block * block_m + tl.arange(0, block_m), tl.arange(0, block_v)
    at = partial + ((head.to(tl.int64) * max_splits + index) * rows + m) * width
    tl.store(at[:, None] + dv[None, :], out, mask=(m < rows)[:, None] & (dv < value_dim)[None, :])
    tl.store(at + width - 4, largest, mask=m < rows)
    tl.store(at + width - 3, total, mask=m < rows)


@triton.jit
def merged(
    partial, v, logits, slow_rows, extent, sinks, v_b, v_h, v_t, v_d, sinks_b, sinks_h, sinks_q, sinks_c, columns,
    batch, kv_heads, size, max_splits, programs,
    queries: tl.constexpr, rows: tl.constexpr, value_dim: tl.constexpr, width: tl.constexpr, has_sinks: tl.constexpr,
    has_fill: tl.constexpr,
    block_batch: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_v: tl.constexpr,
    block_s: tl.constexpr, block_splits: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """The query row of this program: its splits, and the sinks, brought to one denominator.

    Returns the result [block_v], zero for a row that is not slow or may attend to nothing, and the log of the sum of
    the exponentials of its logits, -inf there, NaN where the result is not finite. With `has_fill` and without sinks,
    the result is NaN where all logits are -inf.
    """
    blocks: tl.constexpr = (rows + block_m - 1) // block_m
    head, m = tl.program_id(0) // rows, tl.program_id(0) % rows
    b, h = head // kv_heads, head % kv_heads
    lengths, every_splits, _ = share(
        slow_rows, extent, batch, size, kv_heads * blocks, max_splits, programs, block_batch, block_n
    )
    splits = at_row(every_splits, b, block_batch)
    first = partial + (head.to(tl.int64) * max_splits * rows + m) * width
    # Read before it is known how many hold anything, so that the two latencies overlap.
    every = tl.arange(0, block_splits)
    stats = first + every * (rows * width) + width - 4
    tops = tl.load(stats, mask=every < max_splits, other=NEG_INF)
    totals = tl.load(stats + 1, mask=every < max_splits, other=0.0)
    tops = tl.where(every < splits, tops, NEG_INF)
    totals = tl.where(every < splits, totals, 0.0)
    largest = tl.max(tops, 0)
    shift = tl.where(largest == NEG_INF, 0.0, largest)
    total = tl.sum(tl.where(totals == 0.0, 0.0, totals * tl.exp2((tops - shift) * LOG2E)), 0)
    nothing = total == 0.0
    log_sum = tl.where(nothing, NEG_INF, shift + tl.log2(tl.where(nothing, 1.0, total)) * LN2)
    if has_sinks:
        c = tl.arange(0, block_c)
        q_head = h * (rows // queries) + m // queries
        at_sink = sinks + b.to(tl.int64) * sinks_b + q_head * sinks_h + (m % queries) * sinks_q
        beside = tl.load(at_sink + c * sinks_c, mask=c < columns, other=NEG_INF).to(tl.float32)
        # Sinks so large that this overflows take all the weight, and so they do.
        total += tl.sum(tl.exp2((beside - shift) * LOG2E), 0)
    dv = tl.arange(0, block_v)
    summed = tl.zeros([block_v], tl.float32)
    for start in tl.range(0, splits, block_s):
        s = start + tl.arange(0, block_s)
        at = first + s * (rows * width)
        fade = tl.exp2((tl.load(at + width - 4, mask=s < splits, other=NEG_INF) - shift) * LOG2E)
        inside = (s < splits)[:, None] & (dv < value_dim)[None, :]
        values = tl.load(at[:, None] + dv[None, :], mask=inside, other=0.0)
        summed += tl.sum(values * fade[:, None], 0)
    if tl.max((summed != summed).to(tl.int32), 0) > 0:
        # Zero times what is not finite. Masked values may hold that, so leave them out; to do so in `attend` would make
        # every step slower.
        summed = tl.zeros([block_v], tl.float32)
        length = at_row(lengths, b, block_batch)
        row_logits = logits + (head.to(tl.int64) * rows + m) * pitch_of(size)
        values_here = v + b.to(tl.int64) * v_b + h.to(tl.int64) * v_h
        for start in tl.range(0, length, block_n):
            t = start + tl.arange(0, block_n)
            x = tl.load(row_logits + t, mask=t < length, other=NEG_INF)
            inside = (x != NEG_INF)[:, None] & (dv < value_dim)[None, :]
            at_value = values_here + t.to(tl.int64)[:, None] * v_t + dv[None, :] * v_d
            values = tl.load(at_value, mask=inside, other=0.0).to(tl.float32)
            summed += tl.sum(values * tl.exp2((x - shift) * LOG2E)[:, None], 0)
    empty = 0.0
    if has_fill and not has_sinks:
        empty = tl.where(splits > 0, float("nan"), 0.0)
    found = tl.where(nothing, empty, summed / tl.where(nothing, 1.0, total))
    finite = tl.min((tl.abs(found) < float("inf")).to(tl.int32), 0)
    return found, tl.where(finite == 1, log_sum, float("nan"))


@triton.jit(do_not_specialize=["batch", "kv_heads", "size", "max_splits", "programs", "columns"])
def merge(
    partial, v, logits, slow_rows, extent, sinks, out, lse,
    v_b, v_h, v_t, v_d, sinks_b, sinks_h, sinks_q, sinks_c, columns,
    batch, kv_heads, size, max_splits, programs,
    queries: tl.constexpr, rows: tl.constexpr, value_dim: tl.constexpr, width: tl.constexpr, has_sinks: tl.constexpr,
    has_fill: tl.constexpr,
    block_batch: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_v: tl.constexpr,
    block_s: tl.constexpr, block_splits: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """`merged` for every query row; grid: (B * Hkv * rows,).

    Writes out [B * Hkv * rows, Dv] and lse [B * Hkv * rows].
    """
    result, log_sum = merged(
        partial, v, logits, slow_rows, extent, sinks, v_b, v_h, v_t, v_d, sinks_b, sinks_h, sinks_q, sinks_c, columns,
        batch, kv_heads, size, max_splits, programs,
        queries, rows, value_dim, width, has_sinks, has_fill,
        block_batch, block_m, block_n, block_v, block_s, block_splits, block_c,
    )  # fmt: skip
    tl.store(lse + tl.program_id(0), log_sum)
    dv = tl.arange(0, block_v)
    at = out + tl.program_id(0).to(tl.int64) * value_dim + dv
    tl.store(at, result.to(out.dtype.element_ty), mask=dv < value_dim)
