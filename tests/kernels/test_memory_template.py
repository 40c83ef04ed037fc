"""The template of `sfi::memory_attention`, interpreted, against the float64 oracle; and what it takes of a GPU.

The lowering itself runs, with tensors for Inductor's nodes. Slots that must not be looked at hold NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sfi_compile import ops
from sfi_compile.kernels import heuristics, lowering, reference
from sfi_compile.kernels.heuristics import MemoryShape, Tile
from tests.kernels.eager_inductor import lowered_memory_attention
from tests.kernels.fake_cuda import generated
from tests.kernels.rendering import Operand
from tests.kernels.triton_tools import SHARED_LIMIT, TARGETS, compiled, fits, interpreted, needs_triton

pytestmark = needs_triton
BLOCK = 16


@dataclasses.dataclass
class Case:
    """Arguments of `sfi::memory_attention`."""

    q: Tensor
    mem_k: Tensor
    mem_v: Tensor
    held: Tensor
    mask: Tensor
    softcap: float = 0.0
    sinks: Tensor | None = None
    length: Tensor | None = None

    def run(self, splits: int) -> Tensor:
        """By the lowering, with so many splits and small blocks."""
        scale = self.q.shape[-1] ** -0.5
        arguments = [self.q, self.mem_k, self.mem_v, self.held, self.mask, scale, self.softcap, self.sinks, self.length]
        return interpreted(lowered_memory_attention, splits, {"BLOCK_N": BLOCK}, *arguments)

    def allowed(self, b: int) -> Tensor:
        """The mask of a row and what is filled, bool or float [Hq, Q, S]."""
        heads, (kv_heads, slots) = self.q.shape[1], self.held.shape[1:]
        full = self.held[b] >= 0
        if self.length is not None:
            full = full & (torch.arange(slots) < self.length[b])
        full = full.repeat_interleave(heads // kv_heads, 0)[:, None]
        mask = self.mask[b].repeat_interleave(heads // self.mask.shape[1], 0)
        mask = mask & full if mask.dtype == torch.bool else mask.masked_fill(~full, -math.inf)
        return mask.expand(heads, self.q.shape[2], slots)

    def exact(self, b: int) -> Tensor:
        """float64 [Hq, Q, Dv]."""
        k, v = self.mem_k[b].nan_to_num(0.0), self.mem_v[b].nan_to_num(0.0)
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks[min(b, self.sinks.shape[0] - 1), :, 0].expand(self.q.shape[1], -1)
        scale, cap = self.q.shape[-1] ** -0.5, self.softcap or None
        return reference.attention(self.q[b], k, v, self.allowed(b), scale, softcap=cap, sinks=sinks)

    def budget(self, b: int) -> float:
        """Twice the error of eager attention in the same dtype, or what rounding alone may do."""
        k, v = self.mem_k[b, None].nan_to_num(0.0), self.mem_v[b, None].nan_to_num(0.0)
        mask = self.allowed(b)[None]
        mask = mask if mask.dtype == torch.bool else mask.to(self.q.dtype)
        error = 0.0
        if not self.softcap and self.sinks is None:
            eager = scaled_dot_product_attention(self.q[b, None], k, v, mask, enable_gqa=True)[0].double()
            error = float((eager - self.exact(b)).abs().nan_to_num(0.0).max())
        logits = reference.logits(self.q[b], k[0], None, self.q.shape[-1] ** -0.5).abs().max()
        rounding = torch.finfo(self.q.dtype).eps + 4 * torch.finfo(torch.float32).eps * (1 + float(logits))
        return max(2 * error, rounding * float(v.abs().max()))


def case(
    group: int = 4,
    queries: int = 1,
    key_dim: int = 16,
    value_dim: int = 16,
    slots: int = 70,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    batch: int = 2,
) -> Case:
    """Random queries, keys, values and mask; every fifth slot empty."""
    g = torch.Generator().manual_seed(group * 1000 + queries * 100 + key_dim)
    q = torch.randn(batch, group * kv_heads, queries, key_dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, kv_heads, slots, dim, generator=g).to(dtype) for dim in (key_dim, value_dim))
    held = torch.argsort(torch.rand(batch, kv_heads, slots, generator=g), dim=-1)
    held[torch.rand(held.shape, generator=g) < 0.2] = -1
    return Case(q, k, v, held, torch.rand(batch, kv_heads, 1, slots, generator=g) < 0.8)


def check(case: Case, splits: int) -> Tensor:
    empty = case.held < 0
    if case.length is not None:
        empty = empty | (torch.arange(empty.shape[2]) >= case.length[:, None, None])
    if case.mask.dtype == torch.bool and case.mask.shape[1:3] == (case.held.shape[1], 1):
        empty = empty | ~case.mask[:, :, 0]
    case.mem_k[empty], case.mem_v[empty] = math.nan, math.nan
    out = case.run(splits)
    assert out.dtype == case.q.dtype
    assert out.shape == (*case.q.shape[:3], case.mem_v.shape[-1])
    assert out.isfinite().all()
    for b in range(out.shape[0]):
        error, budget = float((out[b].double() - case.exact(b)).abs().max()), case.budget(b)
        assert error <= budget, f"row {b}: error {error:.3g}, allowed {budget:.3g}"
    return out


@pytest.mark.parametrize(
    ("group", "queries", "splits"),
    [(1, 8, 2), (3, 2, 1), (4, 1, 3), (5, 3, 2), (7, 1, 1), (8, 5, 1), (3, 7, 2), (7, 6, 1)],
)
def test_groups_and_queries(group: int, queries: int, splits: int) -> None:
    check(case(group, queries, batch=1), splits)


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim", "splits"),
    [
        (torch.bfloat16, 64, 64, 1),
        (torch.bfloat16, 80, 24, 2),
        (torch.float16, 24, 48, 1),
        (torch.float16, 16, 16, 2),
        (torch.float32, 8, 5, 1),
        (torch.float32, 80, 64, 2),
    ],
)
def test_dtypes_and_widths(dtype: torch.dtype, key_dim: int, value_dim: int, splits: int) -> None:
    check(case(key_dim=key_dim, value_dim=value_dim, dtype=dtype, batch=1), splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_lengths_and_block_edges(splits: int) -> None:
    lengths = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 69, 1000]
    given = case(batch=len(lengths), kv_heads=1)
    given.length = torch.tensor(lengths)
    check(given, splits)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("heads", "queries", "splits"), [(8, 1, 2), (2, 1, 1), (8, 3, 1), (2, 3, 2)], ids=["heads", "", "both", "queries"]
)
def test_masks(heads: int, queries: int, splits: int, kind: str) -> None:
    given = case(queries=queries)
    shape = (2, heads, queries, 70)
    given.mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    if kind == "float":
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        given.mask = bias.masked_fill(~given.mask, -math.inf)
    check(given, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 8, 1, 3), (1, 8, 1, 1)], ids=str)
def test_sinks(shape: tuple[int, ...], splits: int) -> None:
    given = case(queries=2)
    given.sinks = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    check(given, splits)


@pytest.mark.parametrize("softcap", [0.3, 20.0])
def test_softcap(softcap: float) -> None:
    given = case()
    given.softcap = softcap
    check(given, 2)


@pytest.mark.parametrize("splits", [1, 3])
def test_one_key_takes_all_or_all_are_equal(splits: int) -> None:
    """A logit of 300 beside others near zero, in each block in turn; then no difference at all."""
    for slot in (0, 16, 69):
        given = case(batch=1, kv_heads=1)
        given.held[:], given.mask[:] = torch.arange(70), True
        given.mem_k[:, :, slot] = 0.0
        given.mem_k[:, :, slot, 0], given.q[..., 0] = 1200.0, 1.0
        check(given, splits)
    given = case(batch=1)
    given.q[:] = 0.0
    check(given, splits)


@pytest.mark.parametrize(("sinks", "splits"), [(False, 1), (True, 2), (False, 3)])
def test_a_row_that_may_attend_to_nothing_gets_zeros(sinks: bool, splits: int) -> None:
    given = case(queries=2, batch=3)
    given.held[0] = -1
    given.mask[1, 0] = False
    given.sinks = torch.zeros(1, 1, 1, 1) if sinks else None
    out = check(given, splits)
    assert out[0].eq(0).all()
    assert out[1, :4].eq(0).all()
    assert out[2].ne(0).all()


def test_not_finite_where_attention_is_allowed_shows() -> None:
    given = case()
    given.held[:], given.mask[:] = torch.arange(70), True
    given.mem_v[0, 0, 3, 5] = math.nan
    out = given.run(2)
    assert out[0, :4, :, 5].isnan().all()
    assert int(out.isnan().sum()) == 4


def attend(q: Tensor, k: Tensor, v: Tensor, held: Tensor, newest: Tensor, length: Tensor) -> Tensor:
    """A fast step's attention, with its mask and what comes after."""
    mask = torch.ops.aten.unsqueeze(held <= newest, 2)
    out = torch.ops.sfi.memory_attention(q, k, v, held, mask, 0.1, 0.0, None, length)
    return torch.ops.aten.relu(out)


@pytest.mark.parametrize("batch", [1, 16])
def test_inductor_fuses_what_comes_before_and_after(batch: int) -> None:
    """With enough rows one kernel does it all; otherwise another merges the splits and does what comes after."""
    assert ops.memory_attention
    lowering.register()
    memory = (batch, 8, 2048, 128), torch.bfloat16
    integers = [(shape, torch.int64) for shape in ((batch, 8, 2048), (), (batch,))]
    code = generated(attend, [((batch, 32, 1, 128), torch.bfloat16), memory, memory, *integers])
    template, *merge = code.split("async_compile.triton(")[1:]
    assert "tl.dot" in template
    assert "<=" in template
    assert len(merge) == (batch == 1)
    assert "maximum" in (merge or [template])[0]


SHAPES = {
    "4b": MemoryShape(4, 32, 8, 1, 2176, 128, 128, 2),
    "drafts": MemoryShape(1, 64, 8, 8, 2048, 128, 128, 2),
    "wide": MemoryShape(1, 16, 2, 8, 2048, 256, 256, 2),
    "wide float32": MemoryShape(1, 8, 1, 8, 2048, 256, 256, 4),
}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile_fits_every_gpu(name: str, capability: int) -> None:
    """Compiled, neither registers nor shared memory run out."""
    shape = SHAPES[name]
    dtype = torch.bfloat16 if shape.itemsize == 2 else torch.float32
    tiles = heuristics.memory_tiles(shape, SHARED_LIMIT[capability])
    assert tiles
    for tile in tiles:
        arguments = kernel(shape, tile, dtype)
        usage = compiled(capability, "memory_attention", *arguments, tile.num_warps, tile.num_stages)
        assert fits(usage, capability, tile.num_warps), (tile, usage)


def test_splits_keep_the_multiprocessors_busy() -> None:
    def splits(batch: int, slots: int, kv_heads: int = 8) -> int:
        shape = MemoryShape(batch, 4 * kv_heads, kv_heads, 1, slots, 128, 128, 2)
        return heuristics.memory_splits(shape, Tile(128, 4, 3), 132)

    assert [splits(batch, 2176) for batch in (1, 4, 16)] == [16, 4, 1]
    assert splits(1, 100) == 1
    assert splits(12, 8192) > 1
    assert splits(1, 1_000_000, kv_heads=1) == heuristics.MAX_SPLITS


def kernel(shape: MemoryShape, tile: Tile, dtype: torch.dtype) -> tuple[dict[str, Operand], Operand, dict[str, Any]]:
    """Operands, output and constants of the kernel with splits."""
    memory = shape.batch, shape.kv_heads, shape.slots
    several = shape.queries > 1
    bias_heads = shape.query_heads if several else shape.kv_heads
    operands = {
        "Q": Operand.contiguous((shape.batch, shape.query_heads, shape.queries, shape.key_dim), dtype),
        "K": Operand.contiguous((*memory, shape.key_dim), dtype),
        "V": Operand.contiguous((*memory, shape.value_dim), dtype),
        "BIAS": Operand.contiguous((shape.batch, bias_heads, shape.queries, shape.slots), torch.float32),
        "LENGTH": Operand.contiguous((shape.batch,), torch.int64),
    }
    output = Operand.contiguous(lowering.partial_shape(shape, 4), torch.float32)
    return operands, output, lowering.constants(shape, tile, 0.1, 0.0, True, bias_heads, shape.queries)
