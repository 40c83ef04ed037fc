"""Triton source of the selector's exact top-k: counting, no sort.

Four kernels in turn, over integer keys that are in the order of the scores, of the rows of several sites as in
`triton_scores`:

    sample     every eighth key → how many there are in each of BINS ranges of keys, per head
    gather     the keys of ranges that will hold the k best, with their positions, to a list per head
    threshold  the k-th key and how many of its equals are chosen; per chunk, how many are chosen before
    write      the chosen positions, ascending

The list is exact however the sample turned out: if it holds fewer than k keys, `threshold` takes all. Keys are added to
it in any order of chunks, by atomics on integers; nothing that is returned depends on the order.
Imports triton and `triton_positions`; `top_k_cuda.py` launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sfi_compile.kernels.triton_positions import NO_KEY, length_of, read_until

BINS = tl.constexpr(256)
DIGITS = tl.constexpr(256)
BIN_SHIFT = tl.constexpr(18)
BIN_BASE = tl.constexpr(-4289)
"""A range holds keys with the same upper 14 bits: scores from -128 to about -1/2, 32 ranges for each power of two. What
lies outside goes to the first range and the last."""


@triton.jit
def bin_of(key):
    """The range of a key: 0 to BINS - 1, not descending."""
    return tl.minimum(tl.maximum((key >> BIN_SHIFT) - BIN_BASE, 0), BINS - 1)


@triton.jit
def sample(keys, slow_rows, status, extent, bins, batch, size, heads, block: tl.constexpr):
    """Adds every eighth key of `8 block` positions to the counts of their ranges.

    Of eight runs of eight positions, one is taken whole: that is what memory delivers at once. Which one varies.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    length = length_of(slow_rows, status, extent, b % batch)
    if tl.program_id(0) * block * 8 >= length:
        return
    head = (b * heads + h).to(tl.int64)
    i = tl.program_id(0) * block + tl.arange(0, block)
    run = i >> 3
    t = run * 64 + ((run * 5 + (run >> 3) * 3) & 7) * 8 + (i & 7)
    key = tl.load(keys + head * size + t, t < read_until(length, size), other=NO_KEY)
    counts = tl.histogram(bin_of(key), BINS, mask=key > NO_KEY)
    tl.atomic_add(bins + head * BINS + tl.arange(0, BINS), counts, counts > 0, sem="relaxed")


@triton.jit
def digit_of_kth(counts, k, digits: tl.constexpr):
    """The digit of the k-th largest number, given how many have each digit, and how many have a larger one.

    Digit -1 if there are fewer.
    """
    digit = tl.sum((tl.cumsum(counts, 0, reverse=True) >= k).to(tl.int32), 0) - 1
    return digit, tl.sum(tl.where(tl.arange(0, digits) > digit, counts, 0), 0)


@triton.jit
def gather(
    keys, slow_rows, status, extent, bins, listed, segments, list_key, list_at,
    batch, size, chunks, heads, wanted, block: tl.constexpr, per: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Appends the keys that are in the range with the `wanted`-th of the sample, or above, to the list.

    Ascending in a chunk; where in the list, and how many, goes to `segments` [sites * B, H, 2, chunks]. A program takes
    `per` chunks, reading the next while it works on one.
    """
    first, h, b = tl.program_id(0) * per, tl.program_id(1), tl.program_id(2)
    head = (b * heads + h).to(tl.int64)
    counts = tl.load(bins + head * BINS + tl.arange(0, BINS))
    length = length_of(slow_rows, status, extent, b % batch)
    if first * block >= length:
        return
    lowest, _ = digit_of_kth(counts, wanted, BINS)
    # All candidates if it is the first range, or if there are fewer.
    least = tl.where(lowest > 0, (lowest + BIN_BASE) << BIN_SHIFT, NO_KEY + 1)
    for chunk in tl.range(first, tl.minimum(first + per, tl.cdiv(length, block)), num_stages=stages):
        t = chunk * block + tl.arange(0, block // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        key = tl.load(keys + head * size + t, t < read_until(length, size), other=NO_KEY)
        keep = (key >= least).to(tl.int32)
        of_four = tl.sum(keep, 1)
        ranks = tl.cumsum(of_four, 0)
        found = tl.max(ranks, 0)
        begin = tl.atomic_add(listed + head, found, sem="relaxed")
        tl.store(segments + head * 2 * chunks + chunk, begin)
        tl.store(segments + (head * 2 + 1) * chunks + chunk, found)
        slot = begin + (ranks - of_four)[:, None] + tl.cumsum(keep, 1) - keep
        tl.store(list_key + head * size + slot, key, keep > 0)
        tl.store(list_at + head * size + slot, t, keep > 0)


@triton.jit
def threshold(
    keys, slow_rows, status, extent, bins, listed, segments, list_key, list_at, cut, before, selected,
    batch, size, chunks, heads, k, wanted,
    chunk: tl.constexpr, block: tl.constexpr, block_c: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The k-th key, and what `write` needs. Empty slots become -1.

    Writes `cut` [sites * B, H, 2], the k-th key and how many of its equals are chosen, and `before`
    [sites * B, H, 2, chunks], keys above it, and equal to it, in the chunks before.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    length = length_of(slow_rows, status, extent, b % batch)
    head = (b * heads + h).to(tl.int64)
    list_key += head * size
    list_at += head * size
    filled = 0
    if length > 0:
        members = tl.load(listed + head)
        lowest, _ = digit_of_kth(tl.load(bins + head * BINS + tl.arange(0, BINS)), wanted, BINS)
        c = tl.arange(0, block_c)
        used = c * chunk < length
        if (members < k) & (lowest > 0):
            # The sample misled: everything goes to the list.
            for t0 in range(0, length, block):
                t = t0 + tl.arange(0, block)
                tl.store(list_key + t, tl.load(keys + head * size + t, t < length), t < length)
                tl.store(list_at + t, t, t < length)
            tl.store(segments + head * 2 * chunks + c, c * chunk, used)
            tl.store(segments + (head * 2 + 1) * chunks + c, tl.minimum(length - c * chunk, chunk), used)
            members = length
            lowest = 0
            tl.debug_barrier()
        highest = tl.full([block], NO_KEY, tl.int32)
        candidates = tl.zeros([block], tl.int32)
        for m0 in range(0, members, block):
            m = m0 + tl.arange(0, block)
            key = tl.load(list_key + m, m < members, other=NO_KEY)
            highest = tl.maximum(highest, key)
            candidates += (key > NO_KEY).to(tl.int32)
        top = tl.max(highest, 0).to(tl.int64)
        filled = tl.minimum(tl.sum(candidates, 0), k)
        cut_at = NO_KEY
        room = 0
        if filled == k:
            # The k-th key by digits, of which the first are mostly zero: all keys lie between these bounds. In 64 bits,
            # since keys differ by up to 2^32.
            at_least = tl.full([], NO_KEY + 1, tl.int64)
            if lowest > 0:
                at_least = tl.minimum(((lowest + BIN_BASE) << BIN_SHIFT).to(tl.int64), top)
            span = top - at_least
            room = k
            for digit_place in range(4):
                shift = 24 - 8 * digit_place
                if (span >> shift) > 0:
                    counts = tl.zeros([DIGITS], tl.int32)
                    for m0 in range(0, members, block):
                        m = m0 + tl.arange(0, block)
                        key = tl.load(list_key + m, m < members, other=NO_KEY)
                        digit = (key.to(tl.int64) - at_least) >> shift
                        inside = (m < members) & (digit >= 0) & (digit < DIGITS)
                        counts += tl.histogram(digit.to(tl.int32), DIGITS, mask=inside)
                    of_kth, above = digit_of_kth(counts, room, DIGITS)
                    at_least += of_kth.to(tl.int64) << shift
                    room -= above
            cut_at = at_least.to(tl.int32)
        more = tl.zeros([block_c], tl.int32)
        equal = tl.zeros([block_c], tl.int32)
        for m0 in range(0, members, block):
            m = m0 + tl.arange(0, block)
            of_chunk = tl.load(list_at + m, m < members, other=0) // chunk
            key = tl.load(list_key + m, m < members, other=NO_KEY)
            more += tl.histogram(of_chunk, block_c, mask=key > cut_at)
            equal += tl.histogram(of_chunk, block_c, mask=(m < members) & (key == cut_at))
        tl.store(before + head * 2 * chunks + c, tl.cumsum(more, 0) - more, used)
        tl.store(before + (head * 2 + 1) * chunks + c, tl.cumsum(equal, 0) - equal, used)
        tl.store(cut + head * 2, cut_at)
        tl.store(cut + head * 2 + 1, room)
    for s0 in range(filled, k, block_k):
        s = s0 + tl.arange(0, block_k)
        tl.store(selected + head * k + s, tl.full([block_k], -1, tl.int64), s < k)


@triton.jit
def write(
    slow_rows, status, extent, segments, list_key, list_at, cut, before, selected,
    batch, size, chunks, heads, k,
    chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The chosen positions of a chunk, where they belong."""
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = length_of(slow_rows, status, extent, b % batch)
    if c * chunk >= length:
        return
    head = (b * heads + h).to(tl.int64)
    cut_at, room = tl.load(cut + head * 2), tl.load(cut + head * 2 + 1)
    more = tl.load(before + head * 2 * chunks + c)
    equal = tl.load(before + (head * 2 + 1) * chunks + c)
    first = head * size + tl.load(segments + head * 2 * chunks + c)
    found = tl.load(segments + (head * 2 + 1) * chunks + c)
    for m0 in range(0, found, block):
        m = m0 + tl.arange(0, block)
        key = tl.load(list_key + first + m, m < found, other=NO_KEY)
        t = tl.load(list_at + first + m, m < found, other=0)
        # Both running counts in one: a chunk has fewer than 2^15 positions.
        both = (key > cut_at).to(tl.int32) + (((key == cut_at) & (m < found)).to(tl.int32) << 16)
        ranks = tl.cumsum(both, 0)
        ties = equal + ((ranks - both) >> 16)
        slot = more + ((ranks - both) & 0xFFFF) + tl.minimum(ties, room)
        tl.store(selected + head * k + slot, t.to(tl.int64), (key > cut_at) | ((key == cut_at) & (ties < room)))
        both = tl.sum(both, 0)
        more += both & 0xFFFF
        equal += both >> 16
