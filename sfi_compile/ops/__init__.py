"""The `sfi::` operators of the guarded graph: schemas, meaning, fakes, and a plain implementation for any device.

Passes emit them, and `lower` replaces those of the fast path. This room knows kernels and config, not passes.
"""

from __future__ import annotations

from sfi_compile.ops.device import append_rows, dense_decode, refresh_rows
from sfi_compile.ops.fast import append, gather, memory_attention, remember
from sfi_compile.ops.form import attention
from sfi_compile.ops.linear import linear
from sfi_compile.ops.slow import accumulate, dense_attention, frame, pack, select
from sfi_compile.ops.status import RowStatus

__all__ = [
    "RowStatus",
    "accumulate",
    "append",
    "append_rows",
    "attention",
    "dense_attention",
    "dense_decode",
    "frame",
    "gather",
    "linear",
    "memory_attention",
    "pack",
    "plain",
    "refresh_rows",
    "remember",
    "select",
]

plain = {"gather": gather, "append": append, "memory_attention": memory_attention, "remember": remember}
"""Operators whose plain body is meant to be traced into the graph, so that Inductor compiles it."""
