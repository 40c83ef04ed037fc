"""Operators of a slow step: they work on the rows that `slow_rows` flags and read nothing of the others' context.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq/Hkv, Q queries, N positions allocated, S memory slots.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from sfi_compile import policies
from sfi_compile.config import SelectorSpec
from sfi_compile.kernels import attention, selector, support
from sfi_compile.ops.registration import fake_of, only_writes, operator
from sfi_compile.ops.status import RowStatus


def _flagged(rows: Tensor) -> list[int]:
    return [b for b, flag in enumerate(rows.tolist()) if flag]


@functools.lru_cache(maxsize=64)
def parse_spec(text: str) -> SelectorSpec:
    """The selector spec that a graph carries as text."""
    return SelectorSpec.from_text(text)


def _refreshing(slow_rows: Tensor, status: Tensor) -> list[int]:
    return _flagged(slow_rows & (status == int(RowStatus.READY)))


@operator(reads_flags=True)
def frame(
    mask: Tensor,
    slow_rows: Tensor,
    position: Tensor,
    spec: str,
    selected_end: int,
    slots: int,
    number: float | None = None,
    fill: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a refresh needs that is the same for every site under one mask. Of the slow rows; undefined in others.

    Args:
        mask: bool or float, broadcastable to [B, Hq, Q, N].
        slow_rows: bool [B].
        position: int64 [Q]; the last is the position of the refresh.
        spec: `SelectorSpec.to_text()`.
        selected_end: first slot of the recent segment (sink + k_head).
        slots: slots of the memory.
        number: what blocked logits become, so that a query whose tokens are all blocked, or let through no better than
            that, attends to all. None: they have no weight.
        fill: the same as a float that broadcasts to [B, Hq, Q, N], where it is no one number.

    Returns:
        extent int64 [B, 3]: tokens that any query attends to with any head, one past the last token that any
            query attends to (at least 1), and whether that comes after the position, or all tokens of a query are
            blocked;
        log_position float32 [B, N], the selector's, -inf off its candidates;
        held int64 [B, slots]: the support but for the selected tokens, -1 for empty.
    """
    batch, last = slow_rows.shape[0], int(position[-1])
    extent = torch.zeros(batch, 3, dtype=torch.int64, device=mask.device)
    log_position = torch.full((batch, mask.shape[-1]), attention.NEG_INF, device=mask.device)
    held = torch.full((batch, slots), -1, dtype=torch.int64, device=mask.device)
    for b in _flagged(slow_rows):
        own, blocked = _of_row(mask, b), number if fill is None else _of_row(fill, b)
        for whole, row in zip(
            (extent, log_position, held), framed(own, blocked, last, spec, selected_end, slots), strict=True
        ):
            whole[b] = row[0]
    return extent, log_position, held


def _of_row(x: Tensor, b: int) -> Tensor:
    """Row `b` of a tensor that broadcasts along its first axis, which is kept."""
    return x[b : b + 1] if x.shape[0] > 1 else x


def framed(
    mask: Tensor, blocked: Tensor | float | None, last: int | Tensor, spec: str, selected_end: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of `sfi::frame`, of all rows of a mask [B, 1 or Hq, 1 or Q, N].

    Args:
        mask: bool or float.
        blocked: what blocked logits become (broadcastable to the mask if a tensor); None: they have no weight.
        last: position of the refresh.
        spec: `SelectorSpec.to_text()`.
        selected_end: first slot of the recent segment.
        slots: slots of the memory.
    """
    parsed = parse_spec(spec)
    attended = attention.may_attend(mask)
    sees = None if blocked is None else attention.sees_any(mask, blocked)
    if sees is not None:
        attended = attended | ~sees
    # By any query: queries of one step may see other tokens, and each may be like one of a step to come.
    allowed = attended.flatten(1, 2).any(1)
    length = (allowed * torch.arange(1, mask.shape[-1] + 1, device=mask.device)).amax(-1).clamp_min(1)
    ahead = length > last + 1
    if sees is not None:
        ahead = ahead | ~sees.flatten(1).all(1)
    extent = torch.stack([allowed.sum(-1), length, ahead.long()], 1)
    candidates = support.candidates(allowed, last, parsed.sink, parsed.recent)
    held = support.frame(allowed, last, parsed.sink, parsed.recent, selected_end, slots)
    return extent, selector.log_position(candidates, parsed), held


@fake_of(frame)
def _(
    mask: Tensor,
    slow_rows: Tensor,
    position: Tensor,
    spec: str,
    selected_end: int,
    slots: int,
    number: float | None = None,
    fill: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = slow_rows.shape[0]
    return (
        mask.new_empty(batch, 3, dtype=torch.int64),
        mask.new_empty(batch, mask.shape[-1], dtype=torch.float32),
        mask.new_empty(batch, slots, dtype=torch.int64),
    )


@operator("status", "context", reads_flags=True)
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slow_rows: Tensor,
    extent: Tensor,
    scale: float,
    status: Tensor,
    context: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fill: Tensor | None = None,
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
        status: int64 [B] of `RowStatus`, written for slow rows: raised to SHORT (of a row that may attend to nothing),
            NOT_FINITE or AHEAD where one holds.
        context: int64 [B], written for slow rows: raised to the number of valid tokens.
        softcap: logits x become `softcap * tanh(x / softcap)` before the mask; 0: they do not.
        sinks: [1 or B, 1 or Hq, 1 or Q, C], logits that take weight and give nothing.
        fill: what logits become that the mask blocks with False or -inf, a float that broadcasts to [B, Hq, Q, N].
            None: they have no weight, and a query that may attend to nothing gets zeros.

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
    columns = None if sinks is None else attention.pack_sinks(sinks, query_heads, kv_heads, query_len)
    packed_fill = None if fill is None else attention.pack_mask(fill, query_heads, kv_heads, query_len)
    extents = extent.tolist()
    for b in _flagged(slow_rows):
        valid, length, ahead = extents[b]
        row_sinks = None if columns is None else columns[b if columns.shape[0] > 1 else 0]
        row_mask: Tensor | None = packed_mask[b if packed_mask.shape[0] > 1 else 0, ..., :length]
        blocks = not plain_mask or ahead or valid < length
        # Slots past the length are masked, and may hold anything.
        row_mask = row_mask if blocks else None
        row_fill = None
        if packed_fill is not None and ahead:  # otherwise no weight comes of it
            row_fill = packed_fill[b if packed_fill.shape[0] > 1 else 0, ..., :length]
        out[b], row_logits = attention.dense_row(
            packed[b], k[b, :, :length], v[b, :, :length], row_mask, scale, softcap, row_sinks, row_fill
        )
        logits[b, ..., :length] = row_logits
        logits[b, ..., length:] = attention.NEG_INF
        context[b].clamp_(min=valid)
        if not valid:
            status[b].clamp_(min=RowStatus.SHORT)
        if not math.isfinite(out[b].abs().amax()):
            status[b].clamp_(min=RowStatus.NOT_FINITE)
        elif ahead:
            status[b].clamp_(min=RowStatus.AHEAD)
    return attention.unpack_queries(out, query_heads), logits


@fake_of(dense_attention)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    logits = q.new_empty(q.shape[0], k.shape[1], rows, k.shape[2], dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[-1]), logits


@operator("history", reads_flags=True)
def accumulate(
    logits: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    since: Tensor,
    spec: str,
    history: Tensor,
) -> None:
    """Add what this step attends to, to the history of the slow rows, which begins anew with each sequence.

    Rows in which something is wrong (`RowStatus` past SHORT) add nothing.

    Args:
        logits: float32 [B, Hkv, G*Q, N], -inf where masked.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        extent: int64 [B, 3], of `sfi::frame`.
        since: int64 [B], tokens since each row's last slow step; 0: its sequence begins.
        spec: `SelectorSpec.to_text()`; its policy says how to add.
        history: float32 [B, Hkv, N or more], written; zero where its sequence has attended to nothing.
    """
    policy = policies.parse(parse_spec(spec).policy)
    lengths, tokens, found = extent[:, 1].tolist(), since.tolist(), status.tolist()
    for b in _flagged(slow_rows):
        if not tokens[b]:
            history[b] = 0.0
        past, own = history[b, :, : lengths[b]], logits[b, ..., : lengths[b]]
        # A query that may attend to nothing, whose logits are -inf, adds nothing.
        attention = own.softmax(-1).nan_to_num_(0.0).sum(1)
        if found[b] > RowStatus.SHORT:
            attention.zero_()
        past.copy_(policy.accumulated(past, attention, tokens[b]))
        # What a mask hides now and an earlier step saw: zero almost always.
        hidden = history[b, :, lengths[b] :]
        if hidden.any():
            faded = policy.accumulated(hidden, torch.zeros_like(hidden), tokens[b])
            hidden.copy_(torch.where(hidden > 0.0, faded, 0.0))


fake_of(accumulate)(only_writes)


@operator(reads_flags=True)
def select(
    logits: Tensor,
    keys: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    log_position: Tensor,
    spec: str,
    scale: float = 1.0,
    softcap: float = 0.0,
    queries: Tensor | None = None,
    position: Tensor | None = None,
    started_at: Tensor | None = None,
    history: Tensor | None = None,
    values: Tensor | None = None,
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
        scale: factor of the logits of earlier queries.
        softcap: of the same; 0: none.
        queries: [B, Hq, W, Dk], of `sfi::remember`, this step's among them; those of earlier tokens are evidence, too.
        position: int64 [Q], of this step's tokens; None: it has one, and `queries` are None.
        started_at: int64 [B], where the sequence that the queries are of began; with `queries`.
        history: float32 [B, Hkv, N or more], of `sfi::accumulate`, this step's attention included.
        values: [B, Hkv, N, Dv].

    Returns:
        int64 [B, Hkv, min(k_head, N)], ascending; -1 for unused slots and in rows that do not refresh.
    """
    parsed = parse_spec(spec)
    policy = policies.parse(parsed.policy)
    k = min(parsed.k_head, keys.shape[2])
    out = torch.full((keys.shape[0], keys.shape[1], k), -1, dtype=torch.int64, device=keys.device)
    lengths = extent[:, 1].tolist()
    # Rows are heads first: queries of a step, then of earlier tokens, follow each other within a head.
    own = None if position is None else (position[-1] - position).repeat(logits.shape[2] // position.shape[0])
    for b in _refreshing(slow_rows, status):
        # The selector's work grows with what is valid, not with what is allocated.
        n = lengths[b]
        place = log_position[b, :n]
        candidates = place > attention.NEG_INF
        seen, ages = logits[b, ..., :n], own
        if queries is not None and position is not None and started_at is not None and own is not None:
            first = max(int(position[-1]) - queries.shape[2] + 1, int(started_at[b]))
            earlier = torch.arange(first, int(position[0]), device=keys.device)
            seen = torch.cat([seen, _earlier(queries[b], earlier, keys[b, :, :n], seen, scale, softcap)], 1)
            ages = torch.cat([own, (position[-1] - earlier).repeat(queries.shape[1] // keys.shape[1])])
        past = None if history is None else history[b, :, :n]
        given = None if values is None else values[b, :, :n]
        evidence = policies.Evidence(seen, keys[b, :, :n], candidates, place, parsed, past, given, ages)
        chosen = selector.top_k(policies.scores_of(policy, evidence), candidates, min(k, n))
        out[b, :, : chosen.shape[-1]] = chosen
    return out


def _earlier(queries: Tensor, at: Tensor, keys: Tensor, logits: Tensor, scale: float, softcap: float) -> Tensor:
    """Logits of earlier tokens' queries, float32 [Hkv, G * tokens, N]: of what this step sees, up to each token itself.

    Args:
        queries: [Hq, W, Dk], of `sfi::remember`.
        at: int64 [tokens], their positions.
        keys: [Hkv, N, Dk].
        logits: [Hkv, R, N], of this step; -inf where masked.
        scale: factor.
        softcap: 0: none.
    """
    kept = queries.index_select(1, torch.remainder(at, queries.shape[1]))
    packed = attention.pack_queries(kept.unsqueeze(0), keys.shape[0])[0]
    found = attention.row_logits(packed, keys, scale, softcap).to(logits.dtype)
    seen = (logits > attention.NEG_INF).any(1, keepdim=True)
    past = torch.arange(keys.shape[1], device=keys.device) <= at.repeat(queries.shape[0] // keys.shape[0])[:, None]
    return torch.where(seen & past, found, attention.NEG_INF)


@fake_of(select)
def _(
    logits: Tensor, keys: Tensor, slow_rows: Tensor, status: Tensor, extent: Tensor, log_position: Tensor, spec: str,
    *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    k = min(parse_spec(spec).k_head, keys.shape[2])
    return keys.new_empty(keys.shape[0], keys.shape[1], k, dtype=torch.int64)


@operator("held", "mem_k", "mem_v", reads_flags=True)
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


fake_of(pack)(only_writes)
