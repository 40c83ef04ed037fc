"""Operators of a slow step on a GPU: what `sfi_compile.ops.slow` does, for all rows at once and without a host read.

`lower` puts them in the place of the others, so that a whole slow step is one CUDA graph. Rows that are not slow are
skipped on the device. Kernels are imported when they are launched: Triton is an optional package.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq/Hkv, Q queries, N positions allocated, S memory slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfi_compile.kernels import support
from sfi_compile.ops.registration import fake_of, only_writes, operator
from sfi_compile.ops.slow import framed, parse_spec
from sfi_compile.ops.status import RowStatus


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
    """`sfi::frame` of all rows, slow or not; made to be traced into the graph."""
    # A mask may be one for all rows.
    mask = mask.expand(slow_rows.shape[0], -1, -1, -1)
    return framed(mask, number if fill is None else fill, position[-1], spec, selected_end, slots)


def filled(
    position: Tensor, refreshed_at: Tensor, slow_rows: Tensor | None, selected_end: int, recent: int, slots: int
) -> Tensor:
    """One past the last filled slot of every row, int64 [B], once this step's tokens are appended; made to be traced.

    Zero for slow rows, whose memory is not read in the step that rebuilds it.
    """
    length = support.append_slot(position[-1], refreshed_at, selected_end, recent, slots) + 1
    return length if slow_rows is None else length.masked_fill(slow_rows, 0)


def settle(out: Tensor, slow_rows: Tensor, extent: Tensor, status: Tensor, context: Tensor) -> None:
    """What `sfi::dense_attention` finds in the slow rows, from its output [B, Hq, Q, Dv]; made to be traced."""
    valid, _, ahead = extent.unbind(1)
    finite = out.isfinite().flatten(1).all(1)
    short, broken, early = (int(s) for s in (RowStatus.SHORT, RowStatus.NOT_FINITE, RowStatus.AHEAD))
    found = torch.where(finite, torch.where(ahead > 0, early, torch.where(valid > 0, 0, short)), broken)
    status.copy_(torch.where(slow_rows, torch.maximum(status, found), status))
    context.copy_(torch.where(slow_rows, torch.maximum(context, valid), context))


@operator()
def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slow_rows: Tensor,
    extent: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fill: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention of the slow rows, and what the selector needs: output, logits, their log-sum-exp, key norms.

    Shapes and meaning as of `kernels.dense_decode.dense_decode`, which launches it.
    """
    from sfi_compile.kernels.dense_decode import dense_decode as launch

    return launch(q, k, v, mask, slow_rows, extent, scale, softcap, sinks, fill)


@fake_of(dense_decode)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, kv_heads, size, _dim = k.shape
    rows = q.shape[1] // kv_heads * q.shape[2]
    wide = torch.float32
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(batch, kv_heads, rows, size, dtype=wide),
        q.new_empty(batch, kv_heads, rows, dtype=wide),
        q.new_empty(batch, kv_heads, size, dtype=wide),
    )


@operator()
def select_rows(
    logits: Tensor,
    lse: Tensor,
    log_norm: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    log_position: Tensor,
    spec: str,
) -> Tensor:
    """Evidence → selection, for the slow rows that are ready for a memory: int64 [B, Hkv, min(k_head, N)].

    Shapes and meaning as of `kernels.select_cuda.select_rows`, with the spec as text.
    """
    from sfi_compile.kernels.select_cuda import select_rows as launch

    return launch(logits, lse, log_norm, slow_rows, status, extent, log_position, parse_spec(spec))


@fake_of(select_rows)
def _(logits: Tensor, *rest: Any) -> Tensor:
    batch, kv_heads, _, size = logits.shape
    return logits.new_empty(batch, kv_heads, min(parse_spec(rest[-1]).k_head, size), dtype=torch.int64)


@operator()
def still(x: Tensor) -> Tensor:
    """A copy, which every operator reads where it is: Inductor gives each operator that it does not fuse a copy of its
    own of what is merely an expression."""
    return x.clone()


@fake_of(still)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("held", "mem_k", "mem_v")
def pack_rows(
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    frame: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    sink: int,
    position: Tensor,
    refreshed_at: Tensor,
    offset: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Write the new support and its keys and values into the memory of the slow rows that are ready for one, and append
    this step's tokens to that of the rows that are not slow, unless `offset` is -1: then every row is slow.

    One operator, because Inductor copies a tensor that two operators write one after the other. Shapes and meaning as
    of `pack_rows` and `append_rows` of `kernels.pack_cuda`.
    """
    from sfi_compile.kernels import pack_cuda

    pack_cuda.pack_rows(k, v, selected, frame, slow_rows, status, sink, held, mem_k, mem_v)
    if offset >= 0:
        pack_cuda.append_rows(k, v, slow_rows, position, refreshed_at, offset, held, mem_k, mem_v)


fake_of(pack_rows)(only_writes)
