"""The support and the packed memory `[sink | selected | recent…]`, and the append of a new token.

Slot layout, fixed per compiled graph: `sink` slots, `k_head` slots, then `recent + refresh_interval` slots, of which
slot `j` holds position `p0 - recent + 1 + j` (p0: position of the last refresh). An empty slot has index -1.
Imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def candidates(allowed: Tensor, position: int | Tensor, sink: int, recent: int) -> Tensor:
    """Positions that a selector may choose, bool [..., N]: allowed, past the sink, before the recent segment."""
    t = torch.arange(allowed.shape[-1], device=allowed.device)
    return allowed & (allowed.cumsum(-1) > sink) & (t <= position - recent)


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
    rank = allowed.cumsum(-1)
    # Where the r-th allowed token is; past the end if there are fewer.
    ranks = torch.arange(1, sink + 1, device=allowed.device).expand(*rows, -1).contiguous()
    first = torch.searchsorted(rank, ranks)
    held[..., :sink] = torch.where(first < size, first, -1)
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
