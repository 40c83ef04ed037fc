"""Selection by attention alone on CUDA: all rows and KV heads of several sites in seven launches.

The formulas are `attended.py`'s. Nothing is read on the host, so that CUDA graphs can hold it; rows that
are not slow cost empty programs, and work grows with what may be attended to, not with what is allocated. The same
input gives the same bits, whatever the other rows are. Imports torch; triton at the first call only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sfi_compile.kernels import addresses, top_k_cuda
from sfi_compile.kernels.attended import Attended
from sfi_compile.kernels.heuristics import power_of_two
from sfi_compile.kernels.launching import launch

MOST_AHEAD = 128
"""Positions that attention is carried on to, at most: each is code."""


@dataclasses.dataclass(frozen=True)
class Tiles(top_k_cuda.Tiles):
    """How the work is cut up; powers of two."""

    add: int = 1024
    """Positions whose attention a program adds up, of one head."""
    add_rows: int = 4
    """Rows of logits that it holds at once."""
    add_warps: int = 4
    """Warps of such a program."""
    add_chunks: int = 4
    """How often it does so."""
    add_stages: int = 3
    """How many chunks it holds or reads at once."""
    carry: int = 1024
    """Positions that a program makes keys of, of one head."""
    carry_warps: int = 4
    """Warps of such a program."""


def select_rows(
    logits: Sequence[Tensor],
    lse: Sequence[Tensor],
    log_norm: Sequence[Tensor],
    history: Sequence[Tensor],
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    position: Tensor,
    since: Tensor,
    log_position: Tensor,
    score: Attended,
    most: int,
    tiles: Tiles = Tiles(),
) -> Tensor:
    """Attention → history → selection, the latter for the slow rows that are ready for a memory.

    L sites of the same shapes and under the same mask, B rows, H KV heads, R evidence rows (query heads of a group
    times queries), N positions, a multiple of 16 if whole vectors are to be loaded. Whatever belongs to rows that are
    not slow, or lies past a row's extent, may be anything.

    Args:
        logits: of each site, float32 [B, H, R, N], last stride 1; -inf where masked.
        lse: of each site, contiguous float32 [B, H, R], log-sum-exp of each row of logits (without sinks); -inf for a
            query that may attend to nothing: it adds nothing.
        log_norm: of each site, contiguous float32 [B, H, N], `log(max(‖v‖, 1e-6))`; may be anything where nothing is
            attended to.
        history: of each site, contiguous float32 [B, H, N], written in slow rows up to the position, or the extent if
            that is more; what is past the position of the row's last slow step may be anything. None of a score without
            one.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`. Past SHORT, a row adds nothing.
        extent: int64 [B, 3], of `sfi::frame`; the second is one past the last position that may be attended to.
        position: int64 [Q], of this step's tokens.
        since: int64 [B], tokens since each row's last slow step; 0: its sequence, and its history, begin.
        log_position: float32 [B, N or fewer], of `sfi::frame`: -inf off the candidates.
        score: the numbers of the score.
        most: positions to select, at most N.
        tiles: how to cut up the work.

    Returns:
        int64 [L, B, H, most], ascending; ties go to the lower position; -1 for unused slots, which come last,
        and in rows that do not refresh.

    Raises:
        ImportError: triton is missing.
        ValueError: the last stride of the logits is not 1, or sites differ in strides.
    """
    from sfi_compile.kernels import triton_attended as source

    strides = top_k_cuda.strides_of(logits)
    log_position, extent = log_position.contiguous(), extent.contiguous()
    sites, (batch, heads, rows, size) = len(logits), logits[0].shape
    every, device = sites * batch, logits[0].device
    chunks = -(-size // tiles.add)
    # Arrays of [L * B, H, N] serve in turn: attention, then the keys of the list; the keys; the list's positions.
    worth, *free = torch.empty(3, every, heads, size, dtype=torch.float32, device=device)
    keys, list_key, list_at = (x.view(torch.int32) for x in (free[0], worth, free[1]))
    counts = top_k_cuda.Counts.empty(every * heads, size, tiles, device)
    which = (slow_rows, status, extent)
    fast = device.type != "cpu"
    inputs = addresses.table([*logits, *lse, *log_norm, *history])
    launch(
        source.add, (-(-chunks // tiles.add_chunks), heads, every),
        inputs.addresses, *which, position, since, worth, counts.bins, counts.listed,
        batch, sites, size, position.shape[0], *strides,
        math.log2(score.fading) if score.fading > 0 else -1e4, score.per_step, aligned=inputs.aligned,
        heads=heads, rows=rows, block_r=min(power_of_two(rows), tiles.add_rows), block=tiles.add,
        keeps=bool(history), by_value=score.by_value, n_bins=top_k_cuda.BINS, fast=fast,
        per=tiles.add_chunks, stages=tiles.add_stages, num_warps=tiles.add_warps,
    )  # fmt: skip
    launch(
        source.carry, (-(-size // tiles.carry), heads, every),
        worth, log_position, *which, keys, batch, size, log_position.shape[1], heads, score.weight,
        ahead=min(score.ahead, size - 1), decay=score.decay, carries=score.weight > 0, block=tiles.carry, fast=fast,
        num_warps=tiles.carry_warps,
    )  # fmt: skip
    return top_k_cuda.choose(keys, which, counts, (list_key, list_at), sites, most, tiles)
