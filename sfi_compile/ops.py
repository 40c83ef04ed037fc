"""The `sfi::` operators of the guarded graph: schemas, meaning, fakes, and a plain implementation for any device.

Passes emit them, and `lower` replaces those of the fast path. The slow path's work on the rows that `slow_rows` flags
and read nothing of the others' context. This room knows kernels and config, not passes.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq/Hkv, Q queries, N positions allocated, S memory slots.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sfi_compile.config import SelectorSpec
from sfi_compile.kernels import attention, selector, support


class RowStatus(enum.IntEnum):
    """What a slow step found in a row; the guard of the next step reads it."""

    READY = 0
    """The memory was refreshed."""
    SHORT = 1
    """The context is below the threshold: dense, no memory."""
    NOT_FINITE = 2
    """Attention gave NaN or infinity: dense, no memory."""
    SPLIT = 3
    """The sites write to different positions: dense, no memory."""
    AHEAD = 4
    """The mask lets through positions after the one written (a ring buffer, say): dense, no memory."""


def _flagged(rows: Tensor) -> list[int]:
    return [b for b, flag in enumerate(rows.tolist()) if flag]


_Body = TypeVar("_Body", bound=Callable[..., Any])


def _operator(*written: str, reads_flags: bool = False) -> Callable[[_Body], _Body]:
    """Register a function as `sfi::` operator of its name, for all devices.

    Without `torch.library.custom_op`'s wrappers, which take longer than the small operators of a step themselves.

    Args:
        written: the arguments that it changes in place.
        reads_flags: it reads flags on the host, and must stay outside CUDA graphs.
    """
    tags = (torch.Tag.cudagraph_unsafe,) if reads_flags else ()

    def register(body: _Body) -> _Body:
        name = f"sfi::{body.__name__}"
        torch.library.define(name, torch.library.infer_schema(body, mutates_args=written), tags=tags)
        torch.library.impl(name, "default", body)
        return body

    return register


def _fake_of(operator: Callable[..., Any]) -> Callable[[_Body], _Body]:
    """Register a function as what `operator` does to shapes and dtypes."""

    def register(fake: _Body) -> _Body:
        torch.library.register_fake(f"sfi::{operator.__name__}", fake)
        return fake

    return register


def _only_writes(*_: Any) -> None:
    """The fake of an operator that returns nothing."""


@_operator()
def gather(x: Tensor, index: Tensor, layout: str, out: str, rows: Tensor | None = None) -> Tensor:
    """Gather along the sequence axis, with named axes.

    Args:
        x: any rank; `layout` names its axes: b(atch) h(ead) q(uery) s(equence) d(feature), 1 for an axis of size one.
        index: int64 [B, Hkv, n] positions, or [n] for the same positions in every row and head; -1 reads position 0.
        layout: one letter per axis of `x`.
        out: axes of the result, "bhsd" or "bhqs"; s has length n, axes that `x` lacks have length one, except b and h,
            which take the index's.
        rows: int64 [Q]: which entries of axis q to take (None: all).
    """
    rank = len(out)

    def place(t: Tensor, axis: int) -> Tensor:
        shape = [1] * rank
        shape[axis] = t.shape[0]
        return t.reshape(shape)

    positions = index.clamp_min(0)
    if positions.dim() == 1:
        positions = place(positions, out.index("s"))
    else:
        shape = [positions.shape[0], positions.shape[1], 1, 1]
        shape[out.index("s")] = positions.shape[2]
        positions = positions.reshape(shape)
    indices = []
    for axis, name in enumerate(layout):
        if name == "s":
            indices.append(positions)
        elif name == "1":
            indices.append(torch.zeros([1] * rank, dtype=torch.int64, device=x.device))
        elif name == "q" and rows is not None:
            indices.append(place(rows, out.index("q")))
        else:
            indices.append(place(torch.arange(x.shape[axis], device=x.device), out.index(name)))
    if layout.endswith("d"):
        # The feature axis stays whole: the other indices lose their unit last axis, and the slice supplies it.
        indices = [i.squeeze(-1) for i in indices[:-1]]
    return x[tuple(indices)]


_fake_of(gather)(gather)


@functools.lru_cache(maxsize=64)
def parse_spec(text: str) -> SelectorSpec:
    """The selector spec that a graph carries as text."""
    return SelectorSpec.from_text(text)


def _refreshing(slow_rows: Tensor, status: Tensor) -> list[int]:
    return _flagged(slow_rows & (status == int(RowStatus.READY)))


@_operator(reads_flags=True)
def frame(
    mask: Tensor, slow_rows: Tensor, position: Tensor, spec: str, selected_end: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a refresh needs that is the same for every site under one mask. Of the slow rows; undefined in others.

    Args:
        mask: bool or float, broadcastable to [B, Hq, Q, N].
        slow_rows: bool [B].
        position: int64 [Q]; the last is the position of the refresh.
        spec: `SelectorSpec.to_text()`.
        selected_end: first slot of the recent segment (sink + k_head).
        slots: slots of the memory.

    Returns:
        extent int64 [B, 3]: tokens that the last query may attend to with any head, one past the last of them (at least
        1), and whether any comes after the position; log_position float32 [B, N], the selector's, -inf off its
        candidates; held int64 [B, slots]: the support but for the selected tokens, -1 for empty.
    """
    parsed = parse_spec(spec)
    size, last = mask.shape[-1], int(position[-1])
    extent = torch.zeros(slow_rows.shape[0], 3, dtype=torch.int64, device=mask.device)
    log_position = torch.full((extent.shape[0], size), attention.NEG_INF, device=mask.device)
    held = torch.full((extent.shape[0], slots), -1, dtype=torch.int64, device=mask.device)
    for b in _flagged(slow_rows):
        allowed = attention.may_attend(mask[b if mask.shape[0] > 1 else 0][:, -1]).any(0)
        extent[b, 0] = allowed.sum()
        extent[b, 1] = (allowed * torch.arange(1, size + 1, device=mask.device)).max().clamp_min(1)
        extent[b, 2] = extent[b, 1] > last + 1
        candidates = support.candidates(allowed, last, parsed.sink, parsed.recent)
        log_position[b] = selector.log_position(candidates, parsed)
        held[b] = support.frame(allowed, last, parsed.sink, parsed.recent, selected_end, slots)
    return extent, log_position, held


@_fake_of(frame)
def _(
    mask: Tensor, slow_rows: Tensor, position: Tensor, spec: str, selected_end: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch = slow_rows.shape[0]
    return (
        mask.new_empty(batch, 3, dtype=torch.int64),
        mask.new_empty(batch, mask.shape[-1], dtype=torch.float32),
        mask.new_empty(batch, slots, dtype=torch.int64),
    )


@_operator("status", "context", reads_flags=True)
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slow_rows: Tensor,
    extent: Tensor,
    scale: float,
    min_context: int,
    status: Tensor,
    context: Tensor,
) -> tuple[Tensor, Tensor]:
    """Dense attention of the slow rows, exactly under the site's mask; logits are the by-product.

    Args:
        q: [B, Hq, Q, Dk].
        k: [B, Hkv, N, Dk].
        v: [B, Hkv, N, Dv].
        mask: bool or float, broadcastable to [B, Hq, Q, N].
        slow_rows: bool [B].
        extent: int64 [B, 3], of `sfi::frame`.
        scale: factor of the logits.
        min_context: valid tokens from which a row keeps a memory; a row without any never does.
        status: int64 [B] of `RowStatus`, written for slow rows: raised to SHORT, NOT_FINITE or AHEAD where one holds.
        context: int64 [B], written for slow rows: number of valid tokens.

    Returns:
        output [B, Hq, Q, Dv] (zero in fast rows), logits [B, Hkv, G*Q, N] float32 (-inf where masked; undefined in fast
        rows).
    """
    batch, query_heads, query_len, _ = q.shape
    kv_heads, size = k.shape[1], k.shape[2]
    packed = attention.pack_queries(q, kv_heads)
    packed_mask = attention.pack_mask(mask, query_heads, kv_heads, query_len)
    out = q.new_zeros(batch, kv_heads, packed.shape[2], v.shape[-1])
    logits = torch.empty(batch, kv_heads, packed.shape[2], size, dtype=torch.float32, device=q.device)
    # One mask for all queries and heads, of the kind that only blocks.
    plain_mask = mask.dtype == torch.bool and packed_mask.shape[1:3] == (1, 1)
    extents = extent.tolist()
    for b in _flagged(slow_rows):
        valid, length, ahead = extents[b]
        row_mask = packed_mask[b if packed_mask.shape[0] > 1 else 0, ..., :length]
        blocks = not plain_mask or valid < length
        # Slots past the length are masked, and may hold anything.
        out[b], row_logits = attention.dense_row(
            packed[b], k[b, :, :length], v[b, :, :length], row_mask if blocks else None, scale
        )
        logits[b, ..., :length] = row_logits
        logits[b, ..., length:] = attention.NEG_INF
        context[b] = valid
        if valid < max(min_context, 1):
            status[b].clamp_(min=RowStatus.SHORT)
        if not math.isfinite(out[b].abs().amax()):
            status[b].clamp_(min=RowStatus.NOT_FINITE)
        if ahead:
            status[b].clamp_(min=RowStatus.AHEAD)
    return attention.unpack_queries(out, query_heads), logits


@_fake_of(dense_attention)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slow_rows: Tensor,
    extent: Tensor,
    scale: float,
    min_context: int,
    status: Tensor,
    context: Tensor,
) -> tuple[Tensor, Tensor]:
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    logits = q.new_empty(q.shape[0], k.shape[1], rows, k.shape[2], dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), logits


@_operator(reads_flags=True)
def select(
    logits: Tensor, keys: Tensor, slow_rows: Tensor, status: Tensor, extent: Tensor, log_position: Tensor, spec: str
) -> Tensor:
    """Evidence → selection, for the slow rows that are ready for a memory.

    Args:
        logits: float32 [B, Hkv, G*Q, N], -inf where masked.
        keys: [B, Hkv, N, Dk].
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        extent: int64 [B, 3], of `sfi::frame`.
        log_position: float32 [B, N], of `sfi::frame`.
        spec: `SelectorSpec.to_text()`.

    Returns:
        int64 [B, Hkv, min(k_head, N)], ascending; -1 for unused slots and in rows that do not refresh.
    """
    parsed = parse_spec(spec)
    k = min(parsed.k_head, keys.shape[2])
    out = torch.full((keys.shape[0], keys.shape[1], k), -1, dtype=torch.int64, device=keys.device)
    lengths = extent[:, 1].tolist()
    for b in _refreshing(slow_rows, status):
        # The selector's work grows with what is valid, not with what is allocated.
        n = lengths[b]
        chosen = selector.select(logits[b, ..., :n], keys[b, :, :n], log_position[b, :n], parsed)
        out[b, :, : chosen.shape[-1]] = chosen
    return out


@_fake_of(select)
def _(
    logits: Tensor, keys: Tensor, slow_rows: Tensor, status: Tensor, extent: Tensor, log_position: Tensor, spec: str
) -> Tensor:
    k = min(parse_spec(spec).k_head, keys.shape[2])
    return keys.new_empty(keys.shape[0], keys.shape[1], k, dtype=torch.int64)


@_operator("held", "mem_k", "mem_v", reads_flags=True)
def pack(
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    frame: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    sink: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Write the new support and its keys and values into the memory of the slow rows that are ready for one.

    Args:
        k: [B, Hkv, N, Dk].
        v: [B, Hkv, N, Dv].
        selected: int64 [B, Hkv, k_head].
        frame: int64 [B, S]: the support but for the selected tokens, of `sfi::frame`.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        sink: first slot of the selected tokens.
        held: int64 [B, Hkv, S], written: position in each slot, -1 for empty.
        mem_k: [B, Hkv, S, Dk], written.
        mem_v: [B, Hkv, S, Dv], written.
    """
    for b in _refreshing(slow_rows, status):
        held[b] = frame[b]
        held[b, :, sink : sink + selected.shape[-1]] = selected[b]
        support.copy_rows(held[b], (k[b], mem_k[b]), (v[b], mem_v[b]))


_fake_of(pack)(_only_writes)


@_operator("held", "mem_k", "mem_v")
def append(
    new_k: Tensor,
    new_v: Tensor,
    position: Tensor,
    refreshed_at: Tensor,
    selected_end: int,
    recent: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Append this step's token to every row's recent segment.

    Args:
        new_k: [B, Hkv, 1, Dk].
        new_v: [B, Hkv, 1, Dv].
        position: int64 [1].
        refreshed_at: int64 [B], position of each row's last refresh.
        selected_end: first slot of the recent segment (sink + k_head).
        recent: length of the anchored recent segment.
        held: int64 [B, Hkv, S], written.
        mem_k: [B, Hkv, S, Dk], written.
        mem_v: [B, Hkv, S, Dv], written.
    """
    slots = held.shape[-1]
    position = position.long()
    slot = support.append_slot(position[-1], refreshed_at, selected_end, recent, slots)
    rows = torch.arange(held.shape[0], device=held.device)
    held[rows, :, slot] = position[-1].expand(held.shape[0], held.shape[1])
    mem_k[rows, :, slot] = new_k[:, :, 0]
    mem_v[rows, :, slot] = new_v[:, :, 0]


_fake_of(append)(_only_writes)


@_operator()
def memory_attention(q: Tensor, mem_k: Tensor, mem_v: Tensor, held: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention over the memory (the fast path).

    Args:
        q: [B, Hq, Q, Dk].
        mem_k: [B, Hkv, S, Dk].
        mem_v: [B, Hkv, S, Dv].
        held: int64 [B, Hkv, S]; slots with -1 are not attended to.
        mask: the site's mask at the held positions, bool or float [B, Hkv, Q, S].
        scale: factor of the logits.

    Returns:
        [B, Hq, Q, Dv].
    """
    full = (held >= 0).unsqueeze(2)
    if mask.dtype == torch.bool:
        mask = mask & full
    else:
        mask = torch.where(full, mask.float(), attention.NEG_INF)
    if mask.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[1] // mem_k.shape[1], 1)
    return attention.over_memory(q, mem_k, mem_v, mask, scale)


@_fake_of(memory_attention)
def _(q: Tensor, mem_k: Tensor, mem_v: Tensor, held: Tensor, mask: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], mem_v.shape[-1])


plain = {"gather": gather, "append": append, "memory_attention": memory_attention}
"""Operators whose plain body is meant to be traced into the graph, so that Inductor compiles it."""
