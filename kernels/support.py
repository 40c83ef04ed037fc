"""The support and the packed memory `[sink | selected | recent…]` of one row, and the append of a new token.

Slot layout, fixed per compiled graph: `sink` slots, `k_head` slots, then `recent + refresh_interval` slots, of which
slot `j` holds position `p0 - recent + 1 + j` (p0: position of the last refresh). An empty slot has index -1.
Imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_allowed(allowed: Tensor) -> Tensor:
    """First position that a row may attend to: bool [N] → int64 scalar tensor (0 if none)."""
    return allowed.to(torch.int8).argmax()


def candidates(allowed: Tensor, position: int, sink: int, recent: int) -> Tensor:
    """Positions that a selector may choose: allowed, past the sink, before the anchored recent segment. Bool [N]."""
    rank = allowed.cumsum(0)
    t = torch.arange(allowed.shape[0], device=allowed.device)
    return allowed & (rank > sink) & (t <= position - recent)


def support_of_row(allowed: Tensor, selected: Tensor, position: int, sink: int, recent: int, slots: int) -> Tensor:
    """The support of one row after a refresh at `position`.

    Args:
        allowed: bool [N], what the site's mask lets the row attend to.
        selected: int64 [H, k], -1 for unused.
        position: position of the refresh (p0).
        sink: number of sink tokens.
        recent: length of the anchored recent segment.
        slots: slots of the memory; the segment after `sink + k` must hold at least `recent`.

    Returns:
        int64 [H, slots]: position held by each slot, -1 for empty.
    """
    heads, k = selected.shape
    size = allowed.shape[0]
    support = torch.full((heads, slots), -1, dtype=torch.int64, device=selected.device)
    rank = allowed.cumsum(0)
    is_sink = allowed & (rank <= sink)
    t = torch.arange(size, device=selected.device)
    # Rank r of the valid tokens goes to sink slot r - 1; everything else to a slot past the end, dropped.
    slot = torch.where(is_sink, rank - 1, sink)
    row = torch.full((sink + 1,), -1, dtype=torch.int64, device=selected.device)
    row = row.scatter(0, slot, torch.where(is_sink, t, -1))[:sink]
    support[:, :sink] = row
    support[:, sink : sink + k] = selected
    segment = torch.arange(position - recent + 1, position + 1, device=selected.device)
    inside = segment.clamp(0, size - 1)
    held = (segment >= 0) & allowed[inside] & ~is_sink[inside]
    support[:, sink + k : sink + k + recent] = torch.where(held, segment, -1)
    return support


def gather_rows(x: Tensor, support: Tensor) -> Tensor:
    """Rows of `x` [H, N, D] at `support` [H, S], contiguous; empty slots are zero, so nothing stale can be read."""
    index = support.clamp_min(0).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    rows = x.gather(1, index)
    return torch.where(support.unsqueeze(-1) >= 0, rows, 0.0)


def append_slot(position: Tensor, refreshed_at: Tensor, selected_end: int, recent: int, slots: int) -> Tensor:
    """Slot of the token at `position` (int scalar tensor) for rows refreshed at `refreshed_at` [B]: int64 [B].

    Clamped into the memory: a row without a valid memory gets some slot, and its result is discarded.
    """
    return (position - refreshed_at + (selected_end + recent - 1)).clamp(0, slots - 1)
