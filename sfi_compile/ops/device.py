"""Operators of a slow step on a GPU: what `sfi_compile.ops.slow` does, for all rows at once and without a host read.

`lower` puts them in the place of the others, so that a whole slow step is one CUDA graph. Rows that are not slow are
skipped on the device. Kernels are imported when they are launched: Triton is an optional package.

Shapes: B rows, Hq query heads, Hkv KV heads, G = Hq/Hkv, Q queries, N positions allocated, S memory slots.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sfi_compile import policies
from sfi_compile.kernels import support
from sfi_compile.kernels.heuristics import padded
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


def settle(slow_rows: Tensor, extent: Tensor, status: Tensor, *lse: Tensor) -> None:
    """What `sfi::dense_attention` finds in the slow rows of several sites, from what `sfi::dense_decode` left there:
    log-sum-exps of one shape, NaN where an output is not finite; made to be traced.

    Reads the status, which is never negative, in one place: Inductor writes all that is computed from one out at every
    reader, so with two readers each, the last sites' code would be 2^times long.
    """
    valid, _, ahead = extent.unbind(1)
    broken = functools.reduce(torch.logical_or, (x.isnan() for x in lse)).flatten(1).any(1)
    short, not_finite, early = (int(s) for s in (RowStatus.SHORT, RowStatus.NOT_FINITE, RowStatus.AHEAD))
    found = torch.where(broken, not_finite, torch.where(ahead > 0, early, torch.where(valid > 0, 0, short)))
    status.copy_(torch.maximum(status, torch.where(slow_rows, found, 0)))


def settle_context(slow_rows: Tensor, extent: Tensor, context: Tensor) -> None:
    """The same of the slow rows' context, which depends on the mask alone; made to be traced."""
    context.copy_(torch.maximum(context, torch.where(slow_rows, extent[:, 0], 0)))


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
    norm_of_values: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention of the slow rows, and what the selector needs: output, logits, their log-sum-exp, norms.

    Shapes and meaning as of `kernels.dense_decode.dense_decode`, which launches it.
    """
    from sfi_compile.kernels.dense_decode import dense_decode as launch

    return launch(q, k, v, mask, slow_rows, extent, scale, softcap, sinks, fill, norm_of_values)


@fake_of(dense_decode)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, kv_heads, size, _dim = k.shape
    rows = q.shape[1] // kv_heads * q.shape[2]
    wide = torch.float32
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(batch, kv_heads, rows, padded(size), dtype=wide),
        q.new_empty(batch, kv_heads, rows, dtype=wide),
        q.new_empty(batch, kv_heads, padded(size), dtype=wide),
    )


@operator()
def still(x: Tensor) -> Tensor:
    """A copy, which every operator reads where it is: Inductor gives each operator that it does not fuse a copy of its
    own of what is merely an expression."""
    return x.clone()


@fake_of(still)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("held", "mem_k", "mem_v")
def append_rows(
    k: Tensor,
    v: Tensor,
    slow_rows: Tensor,
    position: Tensor,
    refreshed_at: Tensor,
    offset: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Append this step's tokens to the memory of the rows that are not slow; nothing if `offset` is -1.

    Also says, to whoever orders operators, that the step changes this memory: `sfi::refresh_rows` does that later, but
    Inductor would copy a tensor that two operators write one after the other. Shapes and meaning as of
    `kernels.pack_cuda.append_rows`.
    """
    if offset >= 0:
        from sfi_compile.kernels import pack_cuda

        pack_cuda.append_rows(k, v, slow_rows, position, refreshed_at, offset, held, mem_k, mem_v)


fake_of(append_rows)(only_writes)


@operator("status")
def refresh_rows(
    logits: list[Tensor],
    lse: list[Tensor],
    log_norm: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    history: list[Tensor],
    held: list[Tensor],
    mem_k: list[Tensor],
    mem_v: list[Tensor],
    frame: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    position: Tensor,
    since: Tensor,
    log_position: Tensor,
    spec: str,
    sink: int,
) -> None:
    """Evidence → selection → memory of several sites, for the slow rows that are ready for one.

    What it writes are `held`, `mem_k` and `mem_v`, and `history`, which nothing else in a step reads. It comes after
    `sfi::append_rows` of the same sites, which says so. Before or after attention over this memory in the same step
    makes no difference: that is for the rows that are not slow, of which nothing is written, and reads nothing of the
    others.

    Args:
        logits: of each site, as are the other lists, and `lse` and `log_norm`, of `sfi::dense_decode`.
        k: [B, Hkv, N, Dk].
        v: [B, Hkv, N, Dv].
        history: float32 [B, Hkv, P], of all slow rows, P as of `sfi::dense_decode`; none of a policy that keeps none.
            Undefined past the position of the row's last slow step.
        held: int64 [B, Hkv, S].
        mem_k: [B, Hkv, S, Dk].
        mem_v: [B, Hkv, S, Dv].
        frame: int64 [B, S], of `sfi::frame`, as are the extent and the place of positions; of all sites.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`, when all sites are through; left as it is. That it counts as written keeps
            this operator in the step.
        extent: int64 [B, 3].
        position: int64 [Q], of this step's tokens.
        since: int64 [B], as of `sfi::accumulate`; without histories, anything.
        log_position: float32 [B, N].
        spec: `SelectorSpec.to_text()`.
        sink: first slot of the selected tokens.
    """
    from sfi_compile.kernels import attended_cuda, pack_cuda, select_cuda

    parsed = parse_spec(spec)
    attended, found = policies.attended_of(policies.parse(parsed.policy)), (logits, lse, log_norm)
    most = min(parsed.k_head, k[0].shape[2])
    if attended is None:
        chosen = select_cuda.select_rows(*found, slow_rows, status, extent, log_position, parsed, most)
    else:
        rows = (slow_rows, status, extent, position, since, log_position)
        chosen = attended_cuda.select_rows(*found, history, *rows, attended, most)
    pack_cuda.pack_rows(k, v, chosen, frame, slow_rows, status, sink, held, mem_k, mem_v)


fake_of(refresh_rows)(only_writes)
