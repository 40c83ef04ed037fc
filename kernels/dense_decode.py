"""Dense attention of a slow step on CUDA: one launch for all rows, split along the context, and a small one to merge.

Reads each key and value of the slow rows once, where they lie, and returns beside the output what the selector needs.
Reads nothing on the host, so that CUDA graphs can hold it. Imports torch; triton at the first call only. Under Inductor
the operator is two templates of the same source instead: `dense_lowering.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sfi_compile.kernels.heuristics import padded, power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a site is cut up: query rows and tokens of a tile, warps and pipeline stages of a program.

    `resident` is how many programs a multiprocessor holds at once.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int


def tile_for(rows: int, key_dim: int, value_dim: int, itemsize: int) -> Tile:
    """The tile of a site.

    Args:
        rows: query heads of a group times queries.
        key_dim: width of a key.
        value_dim: width of a value.
        itemsize: bytes of an element.
    """
    width = power_of_two(max(key_dim, value_dim), 16) * itemsize
    if itemsize == 4:
        # Products of float32 are not for tensor cores, and take registers with every query row.
        return Tile(16, 16, 8, 3, 2) if width <= 512 else Tile(16, 16, 8, 2, 1)
    # More query rows than these would spill.
    block_m = min(power_of_two(rows, 16), 32)
    if width > 256:
        return Tile(block_m, 32, 8, 3, 1)
    return Tile(block_m, 64, 4, 3, 2) if block_m == 16 else Tile(block_m, 64, 8, 3, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Grid and constants of both kernels, by the names of their parameters, and what they write."""

    tile: Tile
    grid: int
    """Programs of `split`."""
    partial: tuple[int, int, int, int]
    """Shape of what `split` leaves to `merge`, float32."""
    common: dict[str, int]
    split: dict[str, int | float | bool]
    """`common` and more, and so is `merge`."""
    merge: dict[str, int | float | bool]


def plan(
    q: tuple[int, ...],
    k: tuple[int, ...],
    value_dim: int,
    itemsize: int,
    processors: int,
    scale: float,
    softcap: float,
    mask_by_row: bool,
    mask_is_bool: bool,
    sinks: int,
    fill: float | None = None,
    norm_of_values: bool = False,
    tile: Tile | None = None,
) -> Plan:
    """Plan a site.

    Args:
        q: shape of the queries, [B, Hq, Q, Dk].
        k: shape of the keys, [B, Hkv, N, Dk].
        value_dim: width of a value.
        itemsize: bytes of an element.
        processors: multiprocessors of the device.
        scale: factor of the logits.
        softcap: 0 for none.
        mask_by_row: heads or queries have masks of their own.
        mask_is_bool: it is not a float one.
        sinks: their number of columns, 0 for none.
        fill: what blocked logits become; None: they have no weight.
        norm_of_values: whose norms are written, the values' or the keys'.
        tile: how to cut the site up; None: `tile_for` decides.
    """
    batch, heads, queries, key_dim = q
    _, kv_heads, size, _ = k
    rows = heads // kv_heads * queries
    tile = tile or tile_for(rows, key_dim, value_dim, itemsize)
    programs = processors * tile.resident
    tiles_of = kv_heads * math.ceil(rows / tile.block_m)
    max_splits = min(math.ceil(size / tile.block_n), max(programs // tiles_of, 8))
    # As many as `share` may want, and one more for each head of a row so short that it was rounded up to one.
    grid = (4 if 2 * batch * tiles_of > programs else 1) * programs + batch * tiles_of
    width = math.ceil(value_dim / 4) * 4 + 4
    common = {
        "batch": batch, "kv_heads": kv_heads, "size": size, "max_splits": max_splits, "programs": programs,
        "queries": queries, "rows": rows, "value_dim": value_dim, "width": width,
        "block_batch": power_of_two(batch, 8), "block_m": tile.block_m, "block_n": tile.block_n,
        "block_v": power_of_two(value_dim, 16),
    }  # fmt: skip
    of_split = {
        "scale": float(scale), "softcap": float(softcap), "has_softcap": softcap != 0.0, "key_dim": key_dim,
        "has_fill": fill is not None, "fill": float(fill or 0.0),
        "norm_of_values": norm_of_values,
        "mask_by_row": mask_by_row, "mask_is_bool": mask_is_bool, "block_k": power_of_two(key_dim, 16),
    }  # fmt: skip
    block_splits = power_of_two(max_splits)
    of_merge: dict[str, int | float | bool] = {
        "has_fill": fill is not None, "columns": sinks, "has_sinks": sinks > 0, "block_c": power_of_two(max(sinks, 1)),
        "block_splits": block_splits, "block_s": min(block_splits, 16),
    }  # fmt: skip
    partial = (batch * kv_heads, max_splits, rows, width)
    return Plan(tile, grid, partial, common, common | of_split, common | of_merge)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; of anything else, which only an interpreter runs on, a few."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention of the slow rows, exactly under the site's mask, and what the selector needs.

    What a slow row may not attend to, by False or -inf, may hold anything, NaN included, keys and values alike.

    Args:
        q: [B, Hq, Q, Dk], bfloat16, float16 or float32, as are k and v; any strides, as of k, v, mask and sinks.
        k: [B, Hkv, N, Dk].
        v: [B, Hkv, N, Dv].
        mask: bool or float, broadcastable to [B, Hq, Q, N].
        slow_rows: bool [B].
        extent: int64 [B, 3]; the second column is one past the last token that any query may attend to, the third says
            whether `fill` matters in the row.
        scale: factor of the logits.
        softcap: logits x become `softcap * tanh(x / softcap)` before the mask; 0: they do not.
        sinks: [1 or B, 1 or Hq, 1 or Q, C], logits that take weight and give nothing.
        fill: what logits become that the mask blocks by False or -inf, in rows in which that matters: where a query may
            attend to nothing, or to nothing better. None: they have no weight.
        norm_of_values: return the values' norms in place of the keys'.
        tile: how to cut the site up; None: `tile_for` decides.

    Returns:
        output [B, Hq, Q, Dv] in q's dtype, zero in rows that are not slow and for queries that may attend to nothing;
        logits float32 [B, Hkv, G*Q, P], P the next multiple of 16 from N on, -inf where masked, undefined past the
            extent and in rows that are not slow;
        lse float32 [B, Hkv, G*Q], log of the sum of the exponentials of a query's logits, without the sinks; -inf where
            nothing is allowed and in rows that are not slow; NaN where the output is not finite;
        log_norm float32 [B, Hkv, P], log of the Euclidean norm of each key (or value), which counts as 1e-6 at least;
            defined where the logits are.

    Raises:
        ValueError: a dtype or width that the kernel does not support.
    """
    check(q.dtype, k.dtype, v.dtype, q.shape[-1], v.shape[-1])
    from sfi_compile.kernels import triton_dense_decode as source

    batch, heads, queries, _ = q.shape
    kv_heads, size, value_dim = k.shape[1], k.shape[2], v.shape[-1]
    rows = heads // kv_heads * queries
    mask = mask.expand(batch, heads, queries, size)
    columns = q if sinks is None else sinks.expand(batch, heads, queries, -1)
    planned = plan(
        tuple(q.shape), tuple(k.shape), value_dim, q.element_size(), multiprocessors(q.device), scale, softcap,
        by_row(mask.shape, mask.stride()), mask.dtype == torch.bool, 0 if sinks is None else columns.shape[-1],
        fill, norm_of_values, tile,
    )  # fmt: skip
    slow_rows, extent = slow_rows.contiguous(), extent.contiguous()
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(batch, heads, queries, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, kv_heads, rows, **wide)
    logits = torch.empty(batch, kv_heads, rows, padded(size), **wide)
    log_norm = torch.empty(batch, kv_heads, padded(size), **wide)
    partial = torch.empty(planned.partial, **wide)
    source.split[(planned.grid,)](
        q, k, v, mask, slow_rows, extent, partial, logits, log_norm,
        *q.stride(), *k.stride(), *v.stride(), *mask.stride(),
        **planned.split, on_device=q.device.type != "cpu",
        num_warps=planned.tile.warps, num_stages=planned.tile.stages,
    )  # fmt: skip
    source.merge[(batch * kv_heads * rows,)](
        partial, v, logits, slow_rows, extent, columns, out, lse, *v.stride(), *columns.stride(),
        **planned.merge, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, logits, lse, log_norm


def by_row(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an expanded mask [B, Hq, Q, N] differs between heads or queries; an axis of one keeps any stride."""
    return any(shape[axis] > 1 and strides[axis] != 0 for axis in (1, 2))


def check(q: torch.dtype, k: torch.dtype, v: torch.dtype, key_dim: int, value_dim: int) -> None:
    """Raise ValueError for a site that `dense_decode` does not support."""
    if q not in DTYPES or k != q or v != q:
        raise ValueError(f"q, k, v of dtypes {q}, {k}, {v}; allowed: one of {DTYPES} for all three")
    if max(key_dim, value_dim) > MAX_DIM:
        raise ValueError(f"keys of width {key_dim}, values of width {value_dim}; allowed: at most {MAX_DIM}")
