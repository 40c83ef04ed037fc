"""`sfi::dense_attention` and `sfi::memory_attention` against the float64 oracle.

The allowed error is twice the one that eager attention makes in the same dtype. All memory that torch hands out
uninitialised holds NaN here, and so does all context that an operator must not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sfi_compile.kernels import reference
from sfi_compile.ops import RowStatus
from tests.kernels.cases import BLOCKED, Attention, attentions, dense, poisoned_empty


@pytest.fixture(autouse=True, scope="module")
def _poisoned_empty() -> Iterator[None]:
    with poisoned_empty():
        yield


def assert_within(actual: Tensor, exact: Tensor, budget: float) -> None:
    assert actual.isfinite().all()
    error = float((actual.double() - exact).abs().max())
    assert error <= budget, f"error {error:.3g}, allowed {budget:.3g}"


@given(attentions())
def test_slow_rows_are_dense_and_fast_rows_are_left_alone(case: Attention) -> None:
    out, _, status, context = dense(case)
    assert out.dtype == case.q.dtype
    assert out.shape == (*case.q.shape[:3], case.v.shape[-1])
    for b in range(case.q.shape[0]):
        if b in case.slow:
            assert_within(out[b], case.exact(b), case.budget(b))
            assert context[b] == case.allowed(b).sum()
        else:
            assert out[b].eq(0).all()
            assert context[b] == -7
    assert status.eq(int(RowStatus.READY)).all()


@given(attentions())
def test_logits_are_the_sites_own(case: Attention) -> None:
    logits = dense(case)[1]
    assert logits.dtype == torch.float32
    k, _ = case.clean()
    for b in case.slow:
        exact = reference.logits(case.q[b], k[b], case.mask_of(b), case.scale)
        # A dot product of D terms in float32, its scaling, and the bias: forward bound of D + 4 roundings.
        size = reference.logits(case.q[b].abs(), k[b].abs(), None, case.scale)
        mask = case.mask_of(b)
        bias = torch.zeros(mask.shape) if mask.dtype == torch.bool else mask.double().abs().nan_to_num(posinf=0.0)
        bound = (case.q.shape[-1] + 4) * 2.0**-24 * (size + bias.reshape(exact.shape))
        lowest = -math.inf if mask.dtype == torch.bool else BLOCKED
        blocked = exact <= lowest
        assert (logits[b] <= lowest)[blocked].all()
        assert ((logits[b].double() - exact).abs() <= bound)[~blocked].all()


@given(attentions(), st.data())
def test_a_row_that_may_attend_to_nothing_is_short(case: Attention, data: st.DataObject) -> None:
    b = data.draw(st.sampled_from(case.slow or [0]))
    mask = case.mask.expand(case.q.shape[0], -1, -1, -1).clone()
    mask[b] = False if mask.dtype == torch.bool else -math.inf
    out, _, status, context = dense(dataclasses.replace(case, mask=mask))
    for row in case.slow:
        assert (status[row] == RowStatus.SHORT) == (row == b) == (context[row] == 0)
    assert out[b].eq(0).all()


@given(attentions(), st.sampled_from(["query", "value"]), st.data())
def test_a_row_that_is_not_finite_says_so(case: Attention, where: str, data: st.DataObject) -> None:
    b = data.draw(st.integers(0, case.q.shape[0] - 1))
    q, v = case.q.clone(), case.v.clone()
    if where == "query":
        q[b, 0, -1, 0] = math.nan
    else:
        v[b, :, case.lengths[b] - 1] = math.inf
    spoiled = dataclasses.replace(case, q=q, v=v)
    _, _, status, _ = dense(spoiled)
    expected = [RowStatus.NOT_FINITE if i == b and i in case.slow else RowStatus.READY for i in range(q.shape[0])]
    assert status.tolist() == expected


def test_a_status_is_only_ever_raised() -> None:
    """Sites share it: what one site found, a later one must not take back."""
    one, yes = torch.ones(1, 1, 1, 4), torch.tensor([True])
    case = Attention(one, one, one, yes.reshape(1, 1, 1, 1), yes, 1.0, (1,))
    status, context = torch.tensor([int(RowStatus.NOT_FINITE)]), torch.zeros(1, dtype=torch.int64)
    operands = (case.q, case.k, case.v, case.mask, case.slow_rows, torch.tensor([[1, 1, 0]]), case.scale)
    torch.ops.sfi.dense_attention(*operands, status, context)
    assert status.tolist() == [RowStatus.NOT_FINITE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_of_a_narrow_dtype_are_not_rounded(dtype: torch.dtype) -> None:
    """A logit near 30 is a multiple of 1/8 in bfloat16: weights would be off by a tenth."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, generator=g).to(dtype) for n in (1, 50, 50))
    k[:, :, 7], k[:, :, 8] = q[:, :, 0], q[:, :, 0] * 0.99
    mask = torch.ones(1, 1, 1, 50, dtype=torch.bool)
    case = Attention(q, k, v, mask, torch.tensor([True]), 0.5, (50,))
    held = torch.arange(50).expand(1, 2, 50).contiguous()
    assert_within(dense(case)[0][0], case.exact(0), case.budget(0))
    fast = torch.ops.sfi.memory_attention(q, k, v, held, mask.expand(1, 2, 1, 50), 0.5)
    assert_within(fast[0], case.exact(0), case.budget(0))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
def test_a_query_that_may_attend_to_nothing_gets_zeros(kind: torch.dtype) -> None:
    """As in eager attention. A row of padding alone has no context, hence never a memory."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if kind == torch.bool else kind
    q, k, v = (torch.randn(2, 3, n, 4, generator=g).to(dtype) for n in (2, 5, 5))
    mask = torch.arange(5) <= torch.tensor([2, 3])[:, None]
    mask = mask & torch.tensor([[False, False], [False, True]])[:, None, :, None]
    mask = mask if kind == torch.bool else torch.zeros(mask.shape, dtype=kind).masked_fill(~mask, -math.inf)
    case = Attention(q, k, v, mask, torch.tensor([True, True]), 0.5, (4, 4))
    out, logits, status, context = dense(case)
    eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    assert eager[0].eq(0).all()
    assert torch.equal(out.eq(0), eager.eq(0))
    assert logits[0].eq(-math.inf).all()
    assert status.tolist() == [RowStatus.SHORT, RowStatus.READY]
    assert context.tolist() == [0, 4]


@st.composite
def memories(draw: st.DrawFn) -> tuple[Attention, Tensor]:
    """A site whose rows may all be read, and `held` int64 [B, Hkv, S] in any order, with empty slots."""
    case = draw(attentions())
    case = dataclasses.replace(case, slow_rows=torch.ones_like(case.slow_rows))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    k, v = (x.nan_to_num(0.0) for x in (case.k, case.v))
    k, v = (torch.where(x == 0, torch.randn(x.shape, generator=g).to(x.dtype), x) for x in (k, v))
    case = dataclasses.replace(case, k=k, v=v)
    batch, kv_heads, size, _ = k.shape
    slots = draw(st.integers(1, size + 3))
    held = torch.full((batch, kv_heads, slots), -1, dtype=torch.int64)
    for b in range(batch):
        # Every query attends to its own position at least.
        own = torch.arange(case.lengths[b] - case.q.shape[2], case.lengths[b])[:slots]
        for h in range(kv_heads):
            rest = torch.randperm(size, generator=g)
            kept = torch.cat([own, rest[~torch.isin(rest, own)]])[:slots]
            kept = kept[: max(len(own), draw(st.integers(1, slots)))]
            held[b, h, torch.randperm(slots, generator=g)[: len(kept)]] = kept
    return case, held


def packed(x: Tensor, held: Tensor) -> Tensor:
    rows = x.gather(2, held.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
    return torch.where(held.unsqueeze(-1) >= 0, rows, 0.0)


@given(memories())
def test_a_fast_step_attends_to_the_explicit_support(given_case: tuple[Attention, Tensor]) -> None:
    case, held = given_case
    kv_heads = held.shape[1]
    mask = torch.stack(
        [
            torch.stack([case.mask_of(b)[0][:, held[b, h].clamp_min(0)] for h in range(kv_heads)])
            for b in range(held.shape[0])
        ]
    )
    mem_k, mem_v = packed(case.k, held), packed(case.v, held)
    out = torch.ops.sfi.memory_attention(case.q, mem_k, mem_v, held, mask, case.scale)
    assert out.dtype == case.q.dtype
    for b in range(held.shape[0]):
        positions = [[t for t in row if t >= 0] for row in held[b].tolist()]
        exact = reference.attention(case.q[b], case.k[b], case.v[b], case.mask_of(b), case.scale, positions)
        visible = [
            i for i in range(case.q.shape[2]) if all(case.lengths[b] - case.q.shape[2] + i in p for p in positions)
        ]
        # Eager attention of the same row over what each head holds is the measure of the error.
        budgets = [eager_budget(case, held, mask, b, h) for h in range(kv_heads)]
        assert_within(out[b, :, visible], exact[:, visible], max(budgets))


def eager_budget(case: Attention, held: Tensor, mask: Tensor, b: int, h: int) -> float:
    group = case.q.shape[1] // held.shape[1]
    kept = held[b, h] >= 0
    at = held[b, h, kept]
    mask_of_head = mask[b, h][None, None][..., kept]
    size = at.shape[0]
    alone = Attention(
        case.q[b : b + 1, h * group : (h + 1) * group],
        case.k[b : b + 1, h : h + 1, at],
        case.v[b : b + 1, h : h + 1, at],
        mask_of_head,
        torch.tensor([True]),
        case.scale,
        (size,),
    )
    # Queries whose own position is not held may see nothing: eager attention of them is not defined.
    seen = [i for i in range(case.q.shape[2]) if case.lengths[b] - case.q.shape[2] + i in at.tolist()]
    return dataclasses.replace(alone, q=alone.q[:, :, seen], mask=alone.mask[:, :, seen]).budget(0)


def test_junk_in_empty_slots_has_no_weight() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=g) for n in (1, 6, 6))
    held = torch.tensor([[[0, -1, 2, -1, 4, 5], [-1, -1, 3, -1, -1, 0]]])
    mask = torch.ones(1, 2, 1, 6, dtype=torch.bool)
    clean = torch.ops.sfi.memory_attention(q, packed(k, held), packed(v, held), held, mask, 0.3)
    k, v = (torch.where(held.unsqueeze(-1) >= 0, packed(x, held), 1e30) for x in (k, v))
    assert torch.equal(torch.ops.sfi.memory_attention(q, k, v, held, mask, 0.3), clean)
