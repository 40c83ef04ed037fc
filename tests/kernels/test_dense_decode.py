"""Dense decode for CUDA without a GPU: interpreted, against the float64 oracle and the plain form; and compiled.

What must not be read holds NaN: fast rows, what lies past a row's extent, masked positions, outputs beforehand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sfi_compile.kernels import attention, dense_decode, dense_lowering, reference
from sfi_compile.kernels.dense_decode import Tile
from sfi_compile.kernels.heuristics import padded
from tests.kernels.cases import Attention, attentions, poisoned_empty
from tests.kernels.triton_tools import TARGETS, interpreted, launch, needs_triton

pytestmark = needs_triton
SMALL = Tile(16, 16, 4, 2, 2)
"""Tiles of 16 tokens, so that a short context has several."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Operands of `dense_decode`; `lengths` are what `extent` says."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    slow_rows: Tensor
    lengths: tuple[int, ...]
    scale: float = 0.3
    softcap: float = 0.0
    sinks: Tensor | None = None

    def operands(self) -> tuple[Any, ...]:
        extent = torch.tensor([[-1, n, -1] for n in self.lengths])
        return self.q, self.k, self.v, self.mask, self.slow_rows, extent, self.scale, self.softcap, self.sinks


def ran(operands: tuple[Any, ...], tile: Tile | None, norm_of_values: bool = False) -> tuple[Tensor, ...]:
    """In the interpreter's process."""
    with poisoned_empty():
        return dense_decode.dense_decode(*operands, norm_of_values=norm_of_values, tile=tile)


def check(site: Site, tile: Tile | None = SMALL, norm_of_values: bool = False) -> tuple[Tensor, ...]:
    """All four outputs of every row."""
    q, kv_heads = site.q, site.k.shape[1]
    found = interpreted(ran, site.operands(), tile, norm_of_values)
    out, logits, lse, log_norm = found
    assert out.dtype == q.dtype
    assert logits.shape[-1] == log_norm.shape[-1] == padded(site.k.shape[2])
    mask = site.mask.expand(q.shape[0], q.shape[1], q.shape[2], -1)
    packed = attention.pack_queries(q, kv_heads)
    for b, (slow, n) in enumerate(zip(site.slow_rows.tolist(), site.lengths, strict=True)):
        if not slow:
            assert out[b].eq(0).all()
            assert lse[b].eq(-math.inf).all()
            continue
        row_mask, cap = mask[b, ..., :n], site.softcap or None
        blocked = (~row_mask if row_mask.dtype == torch.bool else row_mask == -math.inf).reshape(kv_heads, -1, n)
        read = ~blocked.all(1, keepdim=True).mT
        k, v = (torch.where(read, x[b, :, :n], 0) for x in (site.k, site.v))
        sinks = None if site.sinks is None else site.sinks.expand(*q.shape[:3], -1)[b].double()
        exact = reference.logits(q[b], k, row_mask, site.scale, cap)
        size = reference.logits(q[b].abs(), k.abs(), None, site.scale)
        bias = row_mask.double().abs().nan_to_num(posinf=0.0).reshape(kv_heads, -1, n)
        bound = (q.shape[-1] + 12) * 2.0**-24 * (1 + size + bias)
        assert torch.equal(logits[b, ..., :n] == -math.inf, blocked)
        kept = ~blocked
        assert ((logits[b, ..., :n].double() - exact).abs() <= bound)[kept].all()

        total = exact.logsumexp(-1)
        assert torch.equal(lse[b] == -math.inf, total == -math.inf)
        some = total > -math.inf
        # 2^-21: the approximations of exponential and logarithm.
        assert ((lse[b].double() - total).abs() <= bound.amax(-1) + 2.0**-21 + 2.0**-22 * total.abs())[some].all()

        answer = torch.zeros(*q.shape[1:3], v.shape[-1], dtype=torch.float64)
        for h in range(q.shape[1]):
            head = slice(h // (q.shape[1] // kv_heads), h // (q.shape[1] // kv_heads) + 1)
            for i in range(q.shape[2]):
                beside = None if sinks is None else sinks[h : h + 1, i]
                one = q[b, h : h + 1, i : i + 1], k[head], v[head], row_mask[h : h + 1, i : i + 1]
                answer[h, i] = reference.attention(*one, site.scale, None, cap, beside)[0, 0]
        rounding = torch.finfo(q.dtype).eps + 4 * float(bound[kept].amax() if kept.any() else 0) + 2.0**-20
        assert out[b].isfinite().all()
        assert (out[b].double() - answer).abs().max() <= 2 * rounding * v.double().abs().max().clamp_min(1e-3)

        norms = torch.where(read[..., 0], log_norm[b, :, :n].double(), 0)
        measured = v if norm_of_values else k
        expected = torch.where(read[..., 0], measured.double().norm(dim=-1).clamp_min(1e-6).log(), 0)
        assert (norms - expected).abs().max() <= 2e-6 * (1 + expected.abs().max())

        # The plain form says the same of logits and output.
        plain_mask = attention.pack_mask(row_mask[None], q.shape[1], kv_heads, q.shape[2])[0]
        columns = None if sinks is None else sinks.float().reshape(kv_heads, packed.shape[2], -1)
        plain, plain_logits = attention.dense_row(packed[b], k, v, plain_mask, site.scale, site.softcap, columns)
        assert (
            attention.unpack_queries(plain[None], q.shape[1])[0] - out[b]
        ).abs().max() <= 4 * rounding * v.abs().max()
        assert torch.equal(plain_logits == -math.inf, blocked)
        assert ((plain_logits - logits[b, ..., :n]).abs() <= 2 * bound)[kept].all()
    return found


@settings(max_examples=2)
@given(attentions(dtypes=(torch.float32, torch.float16)))
def test_any_site(case: Attention) -> None:
    lengths = tuple(n if slow else 0 for n, slow in zip(case.lengths, case.slow_rows.tolist(), strict=True))
    check(Site(case.q, case.k, case.v, case.mask, case.slow_rows, lengths, case.scale))


def site(
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 4,
    queries: int = 1,
    size: int = 50,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float16,
    lengths: tuple[int, ...] = (),
    seed: int = 0,
) -> Site:
    """All of the context allowed, all rows slow; the mask is one for all heads and queries."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, queries, key_dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, kv_heads, size, dim, generator=g).to(dtype) for dim in (key_dim, value_dim))
    lengths = lengths or (size,) * batch
    mask = torch.arange(size) < torch.tensor(lengths)[:, None, None, None]
    for b, n in enumerate(lengths):
        k[b, :, n:], v[b, :, n:] = math.nan, math.nan
    return Site(q, k, v, mask, torch.ones(batch, dtype=torch.bool), lengths)


@pytest.mark.parametrize("lengths", [(1, 16), (15, 17), (31, 33), (50, 49)])
def test_lengths_at_the_edges_of_tiles(lengths: tuple[int, ...]) -> None:
    check(site(lengths=lengths))


def test_nothing_to_do() -> None:
    check(dataclasses.replace(site(lengths=(7, 50)), slow_rows=torch.tensor([False, False])))


def test_rows_of_any_length_beside_each_other() -> None:
    """More splits than wanted: a short row is rounded up to one, and the long one loses nothing."""
    lengths = (1, 3, 7, 16, 320, 2, 9)
    case = site(7, 4, 1, size=320, lengths=lengths, key_dim=4, value_dim=4)
    check(dataclasses.replace(case, slow_rows=torch.tensor([1, 0, 1, 1, 1, 1, 1]) > 0))


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_keys_and_values_may_hold_anything(junk: float) -> None:
    case = site(lengths=(50, 40))
    masked = torch.zeros(2, 50, dtype=torch.bool)
    masked[0, :20] = True  # left padding, more than a tile
    masked[1, [3, 16, 39]] = True
    for x in (case.k, case.v):
        x[masked[:, None].expand(2, 2, 50)] = junk
    check(dataclasses.replace(case, mask=case.mask & ~masked[:, None, None]))
    bias = torch.where(masked[:, None, None] | ~case.mask, -math.inf, 0.5)
    check(dataclasses.replace(case, mask=bias))


def test_values_that_are_attended_to_are_not_forgiven() -> None:
    case = site(1)
    case.v[0, 1, 30, 2] = math.nan
    out, _, lse, _ = interpreted(ran, case.operands(), SMALL)
    assert out[0, 4:, 0, 2].isnan().all()
    assert out[0, :4].isfinite().all()
    # That is what tells the row's status, so every query of that head says it, and no other.
    assert lse[0, 1].isnan().all()
    assert lse[0, 0].isfinite().all()
    case.v[0, 1, 30, 2] = math.inf
    out, _, lse, _ = interpreted(ran, case.operands(), SMALL)
    assert not out[0, 4:, 0, 2].isfinite().any()
    assert lse[0, 1].isnan().all()
    assert lse[0, 0].isfinite().all()
    query = case.q.clone()
    query[0, 0, 0, 0] = math.nan
    out, _, lse, _ = interpreted(ran, dataclasses.replace(site(1), q=query).operands(), SMALL)
    assert out[0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert out[0, 1:].isfinite().all()


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_queries_that_may_attend_to_nothing(kind: torch.dtype) -> None:
    case = site(2, 2, 2, 2)
    mask = case.mask.expand(2, 4, 2, 50).clone()
    mask[0] = False
    mask[1, :, 1] = False
    mask[1, 3] = False
    if kind != torch.bool:
        mask = torch.zeros(mask.shape, dtype=kind).masked_fill(~mask, -math.inf)
    out, _, lse, _ = check(dataclasses.replace(case, mask=mask, sinks=torch.randn(1, 4, 1, 2)))
    assert out[0].eq(0).all()
    assert out[1, :, 1].eq(0).all()
    assert lse[0].eq(-math.inf).all()


def test_one_dominant_key_and_all_keys_equal() -> None:
    case = site(2, dtype=torch.float32)
    case.k[0, :, 33] = 40 * case.q[0, ::4, 0]
    case.k[1] = case.k[1, :, :1]
    case.k[1, :, 7] = 0.0  # its norm is counted as 1e-6
    log_norm = check(case)[3]
    assert log_norm[1, :, 7].allclose(torch.tensor(1e-6).log())


@pytest.mark.parametrize(
    "shape",
    [
        {"key_dim": 24, "value_dim": 5},
        {"key_dim": 16, "value_dim": 32, "dtype": torch.float32},
        {"key_dim": 16, "value_dim": 160},  # wider than tensor cores square
        {"group": 12, "queries": 4, "dtype": torch.bfloat16},  # more rows than a tile holds: the first block writes
    ],
)
def test_the_norms_may_be_those_of_the_values(shape: dict[str, Any]) -> None:
    """Beside which nothing changes, bit for bit."""
    case = site(2, lengths=(50, 33), **shape)
    case.v[1, :, 7] = 0.0  # its norm is counted as 1e-6
    masked = torch.zeros(2, 50, dtype=torch.bool)
    masked[0, [3, 16, 39]] = True
    for x in (case.k, case.v):
        x[masked[:, None].expand(2, 2, 50)] = math.nan
    case = dataclasses.replace(case, mask=case.mask & ~masked[:, None, None])
    *others, log_norm = check(case, norm_of_values=True)
    assert log_norm[1, :, 7].allclose(torch.tensor(1e-6).log())
    *same, of_keys = interpreted(ran, case.operands(), SMALL)
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(others, same, strict=True))
    assert not torch.equal(log_norm[1, :, :33], of_keys[1, :, :33])


@pytest.mark.parametrize("by_row", [False, True])
def test_softcap_sinks_and_biases(by_row: bool) -> None:
    g = torch.Generator().manual_seed(1)
    case = site(2, 1, 3, 2, key_dim=24, value_dim=5, lengths=(50, 21), dtype=torch.float32)
    shape = (2, 3, 2, 50) if by_row else (1, 1, 1, 50)
    bias = torch.randn(shape, generator=g).masked_fill(torch.rand(shape, generator=g) < 0.3, -math.inf)
    sinks = torch.randn(1, 3, 1, 2, generator=g) + 2 if by_row else torch.randn(2, 1, 2, 1, generator=g)
    sinks[:, 0, 0] = 200.0  # takes all the weight
    scaled = dataclasses.replace(case, mask=bias, softcap=2.5, sinks=sinks, scale=1.0)
    check(scaled)


def test_logits_of_any_size_under_a_softcap() -> None:
    """`tanh` by its series and by its quotient, on both sides of where they meet."""
    case = site(1, 1, 1, size=64, key_dim=1, dtype=torch.float32)
    case.q[:], case.k[0, 0, :, 0] = 1.0, torch.cat([-torch.logspace(-8, 2, 32), torch.linspace(0.2, 0.3, 32)])
    check(dataclasses.replace(case, softcap=1.0, scale=1.0))


def test_more_query_rows_than_a_tile_holds() -> None:
    check(site(1, 1, 12, 4, size=33))


def test_any_strides() -> None:
    case = site(2, queries=2, lengths=(50, 20))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v))
    wide = torch.full((*v.shape[:3], 40), math.nan, dtype=v.dtype)
    wide[..., 3:35:2] = v
    check(dataclasses.replace(case, q=q, k=k, v=wide[..., 3:35:2], mask=case.mask.expand(2, 8, 2, 50)))


def test_a_mask_by_token_is_read_once() -> None:
    by_token = torch.ones(1, 1, 1, 50, dtype=torch.bool)
    for queries in (1, 2):
        mask = by_token.expand(2, 4, queries, 50)
        assert not dense_decode.by_row(mask.shape, mask.stride())
    for shape in ((1, 4, 1, 50), (1, 1, 2, 50)):
        mask = torch.ones(shape, dtype=torch.bool).expand(2, 4, shape[2], 50)
        assert dense_decode.by_row(mask.shape, mask.stride())


def test_the_tiles_of_use() -> None:
    check(site(2, size=70, key_dim=64, value_dim=96, lengths=(70, 64)), None)
    check(site(1, size=70, key_dim=192, dtype=torch.float32), None)


def ran_as_templates(case: Site, norm_of_values: bool) -> tuple[Tensor, ...]:
    """The templates as plain kernels, in the interpreter's process."""
    q, k, v, mask, slow_rows, extent, scale, softcap, sinks = case.operands()
    batch, heads, queries, _ = q.shape
    mask = mask.expand(batch, heads, queries, -1)
    columns = {} if sinks is None else {"SINKS": sinks.expand(batch, heads, queries, -1)}
    planned = dense_decode.plan(
        tuple(q.shape), tuple(k.shape), v.shape[-1], q.element_size(), 4, scale, softcap,
        dense_decode.by_row(mask.shape, mask.stride()), True, 0 if sinks is None else sinks.shape[-1],
        norm_of_values=norm_of_values, tile=SMALL,
    )  # fmt: skip
    rows, kv_heads, pitch = planned.common["rows"], k.shape[1], padded(k.shape[2])
    with poisoned_empty():
        logits, log_norm = torch.empty(batch, kv_heads, rows, pitch), torch.empty(batch, kv_heads, pitch)
        lse, partial = torch.empty(batch, kv_heads, rows), torch.empty(planned.partial)
        out = torch.empty(batch, heads, queries, v.shape[-1], dtype=q.dtype)
    given = {"Q": q, "K": k, "V": v, "MASK": mask, "SLOW_ROWS": slow_rows, "EXTENT": extent}
    launch(
        "dense_split",
        (planned.grid,),
        {**given, "LOGITS": logits, "LOG_NORM": log_norm},
        partial,
        dense_lowering.constants(planned.split, on_device=False),
    )
    given = {"PARTIAL": partial, "V": v, "LOGITS": logits, "SLOW_ROWS": slow_rows, "EXTENT": extent, "LSE": lse}
    launch("dense_merge", (batch * kv_heads * rows,), given | columns, out, dense_lowering.constants(planned.merge))
    return out, logits, lse, log_norm


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("fill", [-1e9, -6000.0, -math.inf])
@pytest.mark.parametrize("added", [False, True])
def test_a_query_that_may_attend_to_nothing_better_sees_what_is_blocked(fill: float, beside: int, added: bool) -> None:
    one = site(2, 2, 2, 2, size=37, dtype=torch.float32)
    mask = one.mask.expand(2, 4, 2, -1).clone()
    mask[0, 1, 1] = mask[1, 2:] = False
    if added:  # some of what the second row may attend to is let through, and no better than the rest
        worst = max(fill, torch.finfo(torch.float32).min)
        mask = torch.where(mask, 0.0, -math.inf)
        mask[1, 2:, :, :20] = worst
    sinks = torch.randn(1, 4, 1, beside) - 6000.0 if beside else None
    q, k, v, _, slow_rows, extent, scale, softcap, _ = one.operands()
    extent[:, 2] = 1
    out = interpreted(ran, (q, k, v, mask, slow_rows, extent, scale, softcap, sinks, fill), SMALL)[0]
    for b in range(2):
        packed = attention.pack_queries(q, 2)[b], k[b], v[b], attention.pack_mask(mask, 4, 2, 2)[b]
        columns = None if sinks is None else attention.pack_sinks(sinks, 4, 2, 2)[0]
        plain, _ = attention.dense_row(*packed, scale, 0.0, columns, torch.full((1, 1, 1), fill))
        wanted = attention.unpack_queries(plain[None], 4)[0]
        torch.testing.assert_close(out[b], wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("sinks", "norm_of_values"), [(False, False), (True, False), (False, True)])
def test_the_templates_are_the_same_kernels(sinks: bool, norm_of_values: bool) -> None:
    case = site(2, 2, 2, 2, lengths=(50, 20), value_dim=10)
    case = dataclasses.replace(case, slow_rows=torch.tensor([True, sinks]), softcap=2.0 if sinks else 0.0)
    case = dataclasses.replace(case, sinks=torch.randn(1, 4, 1, 3) if sinks else None)
    expected = interpreted(ran, case.operands(), SMALL, norm_of_values)
    for one, other in zip(interpreted(ran_as_templates, case, norm_of_values), expected, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_what_it_refuses() -> None:
    double = site(1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64.*allowed: one of"):
        dense_decode.dense_decode(*double.operands())
    with pytest.raises(ValueError, match="keys of width 257, values of width 16; allowed: at most 256"):
        dense_decode.dense_decode(*site(1, key_dim=257).operands())


def test_its_operator_says_shapes_and_dtypes() -> None:
    import sfi_compile.ops  # noqa: F401 - it registers them

    with FakeTensorMode():
        case = site(3, 2, 4, 5, size=50, key_dim=16, value_dim=8, dtype=torch.bfloat16)
        extent = torch.empty(3, 3, dtype=torch.int64)
        found = torch.ops.sfi.dense_decode(case.q, case.k, case.v, case.mask, case.slow_rows, extent, 0.5)
    assert [(tuple(x.shape), x.dtype) for x in found] == [
        ((3, 8, 5, 8), torch.bfloat16),
        ((3, 2, 20, 64), torch.float32),
        ((3, 2, 20), torch.float32),
        ((3, 2, 64), torch.float32),
    ]


SITES = {
    "llama": ((4, 32, 8, 1, 128, 128), torch.bfloat16, {}),
    "llama-values": ((4, 32, 8, 1, 128, 128), torch.bfloat16, {"norm_of_values": True}),
    "float32": ((4, 32, 8, 1, 128, 128), torch.float32, {}),
    "float32-values": ((4, 32, 8, 1, 128, 128), torch.float32, {"norm_of_values": True}),
    "drafts": ((2, 28, 4, 8, 64, 64), torch.float16, {"by_row": True, "sinks": True}),
    "latent": ((1, 16, 4, 1, 192, 128), torch.bfloat16, {"softcap": 30.0, "bias": True}),
    "wide": ((1, 8, 1, 8, 256, 256), torch.bfloat16, {"by_row": True, "bias": True}),
    "wide-float32": ((1, 8, 1, 2, 256, 256), torch.float32, {"by_row": True, "bias": True}),
}


@pytest.mark.parametrize(
    ("name", "capability"),
    [*((name, 90) for name in SITES), *((name, x) for name in ("llama", "llama-values") for x in (80, 100))],
)
def test_compiles_without_spills(name: str, capability: int) -> None:
    from sfi_compile.kernels import triton_dense_decode
    from tests.kernels.triton_launches import recorded

    assert capability in TARGETS
    (batch, heads, kv_heads, queries, key_dim, value_dim), dtype, options = SITES[name]

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mask_dtype = torch.float32 if options.get("bias") else torch.bool
    by_row = (heads, queries) if options.get("by_row") else (1, 1)
    with recorded(triton_dense_decode, "split", "merge") as launches:
        dense_decode.dense_decode(
            meta(batch, heads, queries, key_dim),
            meta(batch, kv_heads, 4096, key_dim),
            meta(batch, kv_heads, 4096, value_dim),
            meta(batch, *by_row, 4096, dtype=mask_dtype),
            meta(batch, dtype=torch.bool),
            meta(batch, 3, dtype=torch.int64),
            0.1,
            options.get("softcap", 0.0),
            meta(1, heads, 1, 1) if options.get("sinks") else None,
            norm_of_values=options.get("norm_of_values", False),
        )
    tile = dense_decode.tile_for(heads // kv_heads * queries, key_dim, value_dim, dtype.itemsize)
    assert len(launches) == 2
    for kernel, resident in zip(launches, (tile.resident, 1), strict=True):
        used = kernel.usage(capability)
        assert used.spilled == 0
        assert math.ceil(used.registers / 8) * 8 * 32 * kernel.kwargs["num_warps"] * resident <= 65_536
        assert used.shared * resident <= {80: 163_840, 90: 233_472, 100: 233_472}[capability]
