"""What a slow step finds in a row. Imports nothing."""

from __future__ import annotations

import enum


class RowStatus(enum.IntEnum):
    """What a slow step found in a row; the guard of the next step reads it."""

    READY = 0
    """The memory was refreshed."""
    SHORT = 1
    """The context is below the threshold, or empty: dense, no memory."""
    NOT_FINITE = 2
    """Attention gave NaN or infinity: dense, no memory."""
    SPLIT = 3
    """The sites write to different positions: dense, no memory."""
    AHEAD = 4
    """A query attends to positions after the one written, because the mask lets them through (a ring buffer, say), or
    blocks all with a number: dense, no memory."""
