"""What Inductor does with `sfi::linear`: a template that reads each weight once, and the sum of its splits.

The sum is pointwise, so Inductor fuses it with what follows. Imports kernels and `compat.template`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from sfi_compile.compat import template as inductor
from sfi_compile.kernels import linear_tiles, templating
from sfi_compile.kernels.linear_tiles import BLOCK_M, MOST_WEIGHTS, LinearShape, LinearTile


def register() -> None:
    """Register the lowering with Inductor. Again: nothing changes."""
    inductor.register(torch.ops.sfi.linear.default, lower_linear)


@functools.cache
def _template() -> Any:
    return inductor.make_template("sfi_linear", templating.source("linear"))


def constants(shape: LinearShape, tile: LinearTile, direct: bool) -> dict[str, templating.Constant]:
    """The constants of the template; `direct`: its output is the result."""
    blocks = math.ceil(shape.depth / tile.block_k)
    return {
        "WEIGHTS": len(shape.widths),
        "DIRECT": direct,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SHARE": math.ceil(blocks / tile.splits) * tile.block_k,
        "PAD_DEPTH": shape.depth % tile.block_k != 0,
    }


def lower_linear(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """The lowering of `sfi::linear`; arguments as there, as IR nodes."""
    *outer, depth = inductor.shape_of(x)
    rows, device, dtype = math.prod(outer), inductor.device_of(x), inductor.dtype_of(x)
    if device.type != "cuda" or rows > BLOCK_M or len(weights) > MOST_WEIGHTS:
        return inductor.call_operator(torch.ops.sfi.linear.default, x, weights, biases)
    shape = LinearShape(rows, depth, tuple(inductor.shape_of(w)[0] for w in weights))
    inputs = [inductor.realised(inductor.viewed(x, (rows, depth))), *map(inductor.realised, weights)]
    tile = linear_tiles.tile_for(shape, inductor.processors(device))
    splits = tile.splits
    direct = splits == 1 and all(b is None for b in biases)
    choice = {**constants(shape, tile, direct), "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    total = sum(shape.widths)
    output = ((rows, total), dtype) if direct else ((splits, rows, total), torch.float32)
    found = inductor.choose(_template(), inputs, output, (shape.tiles(tile.block_n), splits, 1), [choice], {})
    parts = [found]
    if not direct or len(weights) > 1:
        starts = itertools.accumulate(shape.widths, initial=0)
        each = zip(starts, shape.widths, biases, strict=False)
        parts = [_part(found, start, (rows, width), bias, dtype) for start, width, bias in each]
    return [inductor.viewed(part, (*outer, width)) for part, width in zip(parts, shape.widths, strict=True)]


def _part(partial: Any, start: int, sizes: tuple[int, int], bias: Any, dtype: torch.dtype) -> Any:
    """Columns of the template's output from `start` on: added up, with the bias, in the result's dtype."""
    ops = inductor.operators()
    load = inductor.loader(partial)
    load_bias = None if bias is None else inductor.loader(bias)
    *splits, _, _ = inductor.shape_of(partial)

    def body(row: Any, column: Any) -> Any:
        if not splits:
            return load(row, start + column)
        terms = [load(s, row, start + column) for s in range(splits[0])]
        if load_bias is not None:
            terms.append(ops.to_dtype(load_bias(column), torch.float32))
        return ops.to_dtype(functools.reduce(ops.add, terms), dtype)

    return inductor.pointwise(sizes, dtype, inductor.device_of(partial), body)
