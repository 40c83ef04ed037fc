"""The support and the packed memory `[sink | selected | recent…]`, and the append of a new token.

Slot layout, fixed per compiled graph: `sink` slots, `k_head` slots, then `recent + refresh_interval` slots, of which
slot `j` holds position `p0 - recent + 1 + j` (p0: position of the last refresh). An empty slot has index -1.
Imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 256
"""Positions in a run that `in_runs` counts by itself."""


def in_runs(flags: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the flags, bool [..., N], are set, counted within runs of `RUN` positions, since a scan over a whole
    row is done by one thread block of a GPU.

    Returns:
        int64 [..., runs, RUN], in its run, up to each position; int64 [..., runs], in this run and those before.
    """
    size = flags.shape[-1]
    runs = max(-(-size // RUN), 1)
    whole = torch.nn.functional.pad(flags, (0, runs * RUN - size))
    inside = whole.reshape(*flags.shape[:-1], runs, RUN).cumsum(-1)
    return inside, inside[..., -1].cumsum(-1)


def running_count(flags: Tensor) -> Tensor:
    """How many of the flags, bool [..., N], are set up to each position, int64: `flags.cumsum(-1)`."""
    return _whole_count(*in_runs(flags))[..., : flags.shape[-1]]


def _whole_count(inside: Tensor, ends: Tensor) -> Tensor:
    """`running_count` from what `in_runs` returns, of whole runs."""
    return (inside + (ends - inside[..., -1]).unsqueeze(-1)).flatten(-2)


def first_places(flags: Tensor, count: int) -> Tensor:
    """Where the first `count` flags of bool [..., N] are set, int64 [..., count]; -1 past the last."""
    inside, ends = in_runs(flags)
    *rows, runs = ends.shape
    ranks = torch.arange(1, count + 1, device=flags.device).expand(*rows, -1).contiguous()
    if count > RUN:  # a run for each would be larger than the row
        found = torch.searchsorted(_whole_count(inside, ends), ranks)
        return torch.where(found < runs * RUN, found, -1)
    found = torch.searchsorted(ends, ranks)  # the run
    run = found.clamp(max=runs - 1)
    left = ranks - (ends - inside[..., -1]).gather(-1, run)
    counts = inside.gather(-2, run.unsqueeze(-1).expand(*run.shape, RUN))
    return torch.where(found < runs, run * RUN + (counts < left.unsqueeze(-1)).sum(-1), -1)


def candidates(allowed: Tensor, position: int | Tensor, sink: int, recent: int) -> Tensor:
    """Positions that a selector may choose, bool [..., N]: allowed, past the sink, before the recent segment."""
    t = torch.arange(allowed.shape[-1], device=allowed.device)
    return allowed & (running_count(allowed) > sink) & (t <= position - recent)


def frame(allowed: Tensor, position: int | Tensor, sink: int, recent: int, selected_end: int, slots: int) -> Tensor:
    """The support after a refresh at `position`, but for the selected tokens.

    Args:
        allowed: bool [..., N], what the site's mask lets each row attend to.
        position: position of the refresh (p0), of all rows.
        sink: number of sink tokens.
        recent: length of the anchored recent segment.
        selected_end: first slot of the recent segment.
        slots: slots of the memory.

    Returns:
        int64 [..., slots]: position held by each slot, -1 for empty.
    """
    *rows, size = allowed.shape
    held = torch.full((*rows, slots), -1, dtype=torch.int64, device=allowed.device)
    rank = running_count(allowed)
    held[..., :sink] = first_places(allowed, sink)
    segment = torch.arange(1 - recent, 1, device=allowed.device) + position
    inside = segment.clamp(0, size - 1)
    # The token just written is held, too: a mask that is strictly causal lets through only later queries.
    attended = torch.where(allowed[..., inside], rank[..., inside] > sink, segment == position) & (segment >= 0)
    held[..., selected_end : selected_end + recent] = torch.where(attended, segment, -1)
    return held


def copy_rows(support: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """For each pair (x, memory), copy the rows of `x` [H, N, D] at `support` [H, S] into `memory` [H, S, D].

    Empty slots become zero, because what a position that nobody may attend to holds can be anything, NaN included.
    """
    index, empty = support.clamp_min(0), (support < 0).nonzero(as_tuple=True)
    for x, memory in pairs:
        for head, positions in enumerate(index):
            # Whole rows; `gather` with an index expanded over D would look up every element by itself.
            torch.index_select(x[head], 0, positions, out=memory[head])
        memory[empty] = 0.0


def append_slot(position: Tensor, refreshed_at: Tensor, selected_end: int, recent: int, slots: int) -> Tensor:
    """Slot of the token at `position` (int scalar tensor) for rows refreshed at `refreshed_at` [B]: int64 [B].

    Clamped into the memory: a row without a valid memory gets some slot, and its result is discarded.
    """
    return (position - refreshed_at + (selected_end + recent - 1)).clamp(0, slots - 1)
