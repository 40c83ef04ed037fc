"""What the lab says when a request cannot be served. Imports nothing."""

from __future__ import annotations


class LabError(ValueError):
    """A request that cannot be served: the message names the thing, its value and what is allowed, on one line."""
