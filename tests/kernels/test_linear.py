"""The template of `sfi::linear`, interpreted, against float64; what it takes of a GPU; how it is tiled and fused.

The lowering itself runs, with tensors for Inductor's nodes.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import sfi_compile.ops  # noqa: F401  (registers the operator)
from sfi_compile.kernels import linear_lowering
from sfi_compile.kernels.linear_tiles import RESIDENT, LinearShape, LinearTile, splits_for, tile_for
from tests.kernels.eager_inductor import lowered_linear
from tests.kernels.fake_cuda import generated
from tests.kernels.rendering import Operand
from tests.kernels.triton_tools import TARGETS, compiled, fits, interpreted, needs_triton

PROCESSORS = 132
MEASURED = {
    "k": LinearShape(4, 2560, (1024,)),
    "q": LinearShape(4, 2560, (4096,)),
    "q, k, v": LinearShape(4, 2560, (4096, 1024, 1024)),
    "o": LinearShape(4, 4096, (2560,)),
    "gate": LinearShape(4, 2560, (9728,)),
    "gate, up": LinearShape(4, 2560, (9728, 9728)),
    "down": LinearShape(4, 9728, (2560,)),
    "wide down": LinearShape(4, 14336, (4096,)),
}


def operands(
    rows: tuple[int, ...], depth: int, widths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """An input and weights, random."""
    g = torch.Generator().manual_seed(depth + sum(widths))
    x = torch.randn(*rows, depth, generator=g).to(dtype)
    return x, [torch.randn(n, depth, generator=g).to(dtype) for n in widths]


def check(tile: LinearTile, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> None:
    found = interpreted(lowered_linear, tile, x, weights, biases)
    assert len(found) == len(weights)
    for out, w, b in zip(found, weights, biases, strict=True):
        exact = linear(x.double(), w.double(), None if b is None else b.double())
        eager = linear(x, w, b)
        assert out.shape == eager.shape
        assert out.dtype == eager.dtype
        error, allowed = (out.double() - exact).abs().max(), 2 * (eager.double() - exact).abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@needs_triton
@pytest.mark.parametrize("rows", [(1,), (3, 1), (2, 8)], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_splits_and_dtypes(rows: tuple[int, ...], splits: int, dtype: torch.dtype) -> None:
    x, weights = operands(rows, 128, (40,), dtype)
    check(LinearTile(16, 32, splits, 4, 3), x, weights, [None])


@needs_triton
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("widths", [(1,), (17, 16), (5, 33, 16)], ids=str)
def test_several_weights_of_odd_sizes(widths: tuple[int, ...], splits: int) -> None:
    """Weights end within a tile, and the features within a block."""
    x, weights = operands((5, 1), 112, widths, torch.bfloat16)
    check(LinearTile(16, 32, splits, 4, 3), x, weights, [None] * len(widths))


@needs_triton
@pytest.mark.parametrize("splits", [1, 2])
def test_biases(splits: int) -> None:
    x, weights = operands((4,), 64, (16, 20, 30), torch.bfloat16)
    check(LinearTile(16, 32, splits, 4, 3), x, weights, [torch.randn(16).bfloat16(), None, torch.randn(30).bfloat16()])


@needs_triton
def test_an_input_with_strides() -> None:
    x, weights = operands((1, 64), 4, (20,), torch.bfloat16)
    weights = [w.repeat(1, 16) for w in weights]
    check(LinearTile(16, 32, 2, 4, 3), x.transpose(1, 2), weights, [None])


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    "shape", [MEASURED["q, k, v"], MEASURED["gate, up"], LinearShape(16, 2576, (9000,))], ids=["", "wide", "padded"]
)
def test_it_fits_every_gpu(shape: LinearShape, capability: int) -> None:
    tile = tile_for(shape, PROCESSORS)
    direct = tile.splits == 1
    weights = {f"W{i}": Operand.contiguous((n, shape.depth), torch.bfloat16) for i, n in enumerate(shape.widths)}
    x = Operand.contiguous((shape.rows, shape.depth), torch.bfloat16)
    sizes = (*(() if direct else (tile.splits,)), shape.rows, sum(shape.widths))
    output = Operand.contiguous(sizes, torch.bfloat16 if direct else torch.float32)
    constants = linear_lowering.constants(shape, tile, direct)
    usage = compiled(capability, "linear", {"X": x, **weights}, output, constants, tile.num_warps, tile.num_stages)
    assert fits(usage, capability, tile.num_warps), usage
    # Two programs a multiprocessor; sm_80 has 164 KB.
    assert RESIDENT * (usage.shared + 1024) <= {80: 164, 90: 228, 100: 228}[capability] * 1024


def test_tiles_are_those_measured_best() -> None:
    best = {name: tile_for(shape, PROCESSORS) for name, shape in MEASURED.items()}
    splits = {name: tile.splits for name, tile in best.items()}
    assert splits == {
        "k": 10, "q": 4, "q, k, v": 2, "o": 6, "gate": 1, "gate, up": 1, "down": 4, "wide down": 3,
    }  # fmt: skip
    assert {name for name, tile in best.items() if tile.block_n != 64} == {"gate, up"}


@pytest.mark.parametrize("processors", [16, 108, 132, 148])
def test_splits_cover_all_features_and_none_is_idle(processors: int) -> None:
    for tiles, blocks in itertools.product([1, 5, 16, 40, 131, 132, 133, 264, 300, 2000], [1, 2, 7, 20, 76, 112]):
        splits = splits_for(tiles, blocks, processors)
        each = math.ceil(blocks / splits)
        assert splits * each >= blocks
        assert (splits - 1) * each < blocks
        assert splits == 1 or splits * tiles <= RESIDENT * processors


SIZES = {name: [(4, 1, s.depth), *((n, s.depth) for n in s.widths)] for name, s in MEASURED.items()}
HALF = torch.bfloat16
aten = torch.ops.aten


def kernels(function: Any, *sizes: tuple[int, ...]) -> list[str]:
    """Kinds of the kernels that Inductor writes for an H100: template, pointwise, reduction."""
    linear_lowering.register()
    code = generated(function, [(size, HALF) for size in sizes])
    return re.findall(r"async_compile\.triton\('triton_(\w{3})_", code)


@needs_triton
def test_what_follows_is_fused() -> None:
    def activated(x: Tensor, w: Tensor, other: Tensor) -> Any:
        return aten.relu(torch.ops.sfi.linear(x, [w], [None])[0]) * other

    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Any:
        left, right = torch.ops.sfi.linear(x, [gate, up], [None, None])
        return aten.sigmoid(left) * right

    def apart(x: Tensor, *weights: Tensor) -> Any:
        q, k, v = torch.ops.sfi.linear(x, list(weights), [None] * 3)
        return aten.mul(aten.view(k, [4, 8, 128]), aten.view(v, [4, 8, 128])), aten.sum(aten.view(q, [4, 32, 128]), [2])

    assert kernels(activated, *SIZES["gate"], (4, 1, 9728)) == ["tem"]
    assert kernels(activated, *SIZES["down"], (4, 1, 2560)) == ["tem", "poi"]
    assert kernels(gated, *SIZES["gate, up"]) == ["tem", "poi"]
    assert sorted(kernels(apart, *SIZES["q, k, v"])) == ["per", "poi", "tem"]
