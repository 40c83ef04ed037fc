"""What Inductor does with `sfi::dense_decode`: two templates, of the source of the kernels that run without it.

Both have a single choice, so that no mode times several: Inductor's choice among several loses what a template writes
beside its output. Imports kernels and `compat.template`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from sfi_compile.compat import template as inductor
from sfi_compile.kernels import dense_decode, templating
from sfi_compile.kernels.heuristics import padded


def register() -> None:
    """Register the lowering with Inductor. Again: nothing changes."""
    inductor.register(torch.ops.sfi.dense_decode.default, lower_dense_decode)


@functools.cache
def _template(name: str) -> Any:
    return inductor.make_template(f"sfi_{name}", templating.source(name))


def constants(planned: dict[str, Any], on_device: bool | None = None) -> dict[str, templating.Constant]:
    """A plan's constants as a template names them; `on_device` of the split only."""
    # As source: an infinity has no literal.
    named = {n.upper(): "float('-inf')" if value == -math.inf else value for n, value in planned.items()}
    return named if on_device is None else {**named, "ON_DEVICE": on_device}


def lower_dense_decode(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    slow_rows: Any,
    extent: Any,
    scale: float,
    softcap: float = 0.0,
    sinks: Any = None,
    fill: float | None = None,
    norm_of_values: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """The lowering of `sfi::dense_decode`; arguments as there, as IR nodes."""
    device, dtype = inductor.device_of(q), inductor.dtype_of(q)
    batch, heads, queries, key_dim = inductor.shape_of(q)
    _, kv_heads, size, value_dim = inductor.shape_of(v)
    dense_decode.check(dtype, inductor.dtype_of(k), inductor.dtype_of(v), key_dim, value_dim)
    mask = inductor.expanded(mask, (batch, heads, queries, size))
    q, k, v, mask, slow_rows, extent = (inductor.realised(x) for x in (q, k, v, mask, slow_rows, extent))
    columns = 0
    beside = []
    if sinks is not None:
        columns = inductor.shape_of(sinks)[-1]
        whole = (batch, heads, queries, columns)
        beside = [inductor.realised(inductor.expanded(sinks, whole))]
    planned = dense_decode.plan(
        (batch, heads, queries, key_dim), (batch, kv_heads, size, key_dim), value_dim, dtype.itemsize,
        inductor.processors(device), scale, softcap,
        dense_decode.by_row(inductor.shape_of(mask), inductor.strides_of(mask)),
        inductor.dtype_of(mask) == torch.bool, columns, fill, norm_of_values,
    )  # fmt: skip
    rows, pitch = planned.common["rows"], padded(size)
    logits, log_norm, lse = (
        inductor.empty(shape, torch.float32, device)
        for shape in ((batch, kv_heads, rows, pitch), (batch, kv_heads, pitch), (batch, kv_heads, rows))
    )
    partial = inductor.launch(
        _template("dense_split"),
        [q, k, v, mask, slow_rows, extent, logits, log_norm],
        [logits, log_norm],
        (planned.partial, torch.float32),
        (planned.grid, 1, 1),
        {
            **constants(planned.split, on_device=True),
            "num_warps": planned.tile.warps,
            "num_stages": planned.tile.stages,
        },
    )
    out = inductor.launch(
        _template("dense_merge"),
        [inductor.realised(partial), v, logits, slow_rows, extent, lse, *beside],
        [lse],
        ((batch, heads, queries, value_dim), dtype),
        (batch * kv_heads * rows, 1, 1),
        {**constants(planned.merge), "num_warps": 4, "num_stages": 1},
    )
    return out, logits, lse, log_norm
