"""Who is slow: the rules of one row, in plain Python, without tensors. The runtime feeds it and obeys it.

Position `p` is the cache slot of the step's last token; `p0` that of the row's last refresh.
"""

from __future__ import annotations

import dataclasses
import enum

from sfi_compile.config import Config


class Trigger(enum.Enum):
    """Why a row is slow."""

    INVALID = "invalid"
    """No memory, or one that was not built from this sequence."""
    INTERVAL = "interval"
    """The last refresh is `refresh_interval` tokens ago."""
    BOUNDARY = "boundary"
    """The token fed ends a sentence or clause, and the last refresh is at least `min_refresh_gap` tokens ago."""


@dataclasses.dataclass
class Row:
    """What is remembered of one row between steps."""

    valid: bool = False
    refreshed_at: int = 0
    """p0; meaningful while valid."""
    context: int = 0
    """Valid tokens at the last step."""
    started_at: int = 0
    """Position of the first token that the row was fed as part of this sequence."""
    slow_at: int | None = None
    """Position of the last slow step of this sequence; None: there was none."""
    support: float = 0.0
    """Tokens per KV head that the memories held after the last refresh (mean over heads)."""
    quiet_until: int = 0
    """Boundaries before this position are ignored (`sentence_cooldown`)."""


def trigger(row: Row, config: Config, position: int, continues: bool, boundary: bool) -> Trigger | None:
    """Why the row must be slow at `position`, or None: it may be fast.

    Args:
        row: the row's memory.
        config: `refresh_interval`, `min_refresh_gap`, `sentence_cooldown`.
        position: p.
        continues: this step continues the sequence that the memory was built from.
        boundary: the token fed into this step is a boundary token.
    """
    if not (row.valid and continues):
        return Trigger.INVALID
    since = position - row.refreshed_at
    if since >= config.refresh_interval:
        return Trigger.INTERVAL
    if boundary and since >= config.min_refresh_gap and position >= row.quiet_until:
        return Trigger.BOUNDARY
    return None


def refreshed(row: Row, config: Config, position: int, why: Trigger) -> None:
    """Record a refresh at `position`."""
    row.valid = True
    row.refreshed_at = position
    row.quiet_until = position + config.sentence_cooldown + 1 if why is Trigger.BOUNDARY else 0
