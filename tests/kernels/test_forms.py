"""Softcap, sinks, masks by head and query, several tokens: the operators of attention agree with its formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sfi_compile.ops  # noqa: F401 - it registers them

SFI = torch.ops.sfi


@dataclasses.dataclass(frozen=True)
class Case:
    """A site in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    softcap: float
    sinks: Tensor | None
    scale: float = 0.4

    def exact(self) -> Tensor:
        """The formula, on heads that are repeated and a mask that is expanded."""
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (self.k, self.v))
        logits = self.q @ k.transpose(2, 3) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        bias = torch.where(self.mask, 0.0, -torch.inf) if self.mask.dtype == torch.bool else self.mask
        logits = logits + bias
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.expand(*logits.shape[:3], -1)], -1)
        return logits.softmax(-1)[..., : k.shape[2]] @ v


@st.composite
def cases(draw: st.DrawFn) -> Case:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, group, queries = (draw(st.integers(1, n)) for n in (2, 3, 3, 4))
    heads, size, dim = kv_heads * group, draw(st.integers(4, 12)), 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, queries)]
    mask = torch.rand(*shape, size, generator=g) < 0.7
    mask[..., 0] = True
    if draw(st.booleans()):
        mask = torch.where(mask, normal(*shape, size), -torch.inf)
    sinks = None
    if draw(st.booleans()):
        sinks = normal(*(draw(st.sampled_from([1, n])) for n in (batch, heads, queries)), draw(st.integers(1, 2)))
    q, k, v = normal(batch, heads, queries, dim), normal(batch, kv_heads, size, dim), normal(batch, kv_heads, size, 2)
    return Case(q, k, v, mask, draw(st.sampled_from([0.0, 1.5])), sinks)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@given(cases())
def test_the_canonical_form(c: Case) -> None:
    close(SFI.attention(c.q, c.k, c.v, c.mask, c.scale, c.softcap, c.sinks), c.exact())


@given(cases())
def test_dense_attention(c: Case) -> None:
    batch, size = c.q.shape[0], c.k.shape[2]
    status, context = (torch.zeros(batch, dtype=torch.int64) for _ in range(2))
    extent = torch.tensor([[size, size, 0]]).repeat(batch, 1)
    rows = torch.ones(batch, dtype=torch.bool)
    operands = (c.q, c.k, c.v, c.mask, rows, extent, c.scale, status, context, c.softcap, c.sinks)
    # A plain mask that lets everything through is recognised by its count.
    if c.mask.dtype == torch.bool and c.mask.shape[1:3] == (1, 1):
        extent[:, 0] = c.mask.sum(-1).reshape(-1)
    close(SFI.dense_attention(*operands)[0], c.exact())


@given(cases(), st.data())
def test_memory_attention(c: Case, data: st.DataObject) -> None:
    """A memory of all tokens in any order, with empty slots between them that hold anything finite."""
    batch, kv_heads, size, _ = c.k.shape
    slots = size + 3
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    order = torch.stack([torch.randperm(slots, generator=g) for _ in range(batch * kv_heads)])
    held = torch.where(order < size, order, -1).reshape(batch, kv_heads, slots)
    mem_k, mem_v = (t.gather(2, held.clamp_min(0)[..., None].expand(-1, -1, -1, t.shape[-1])) for t in (c.k, c.v))
    empty = (held < 0)[..., None]
    mem_k, mem_v = torch.where(empty, 7.0, mem_k), torch.where(empty, -7.0, mem_v)
    by_head = c.mask.shape[1] > 1
    at = held.repeat_interleave(c.q.shape[1] // kv_heads, 1) if by_head else held
    layout = "".join(n if size > 1 else "1" for n, size in zip("bhq", c.mask.shape, strict=False)) + "s"
    mask = SFI.gather(c.mask, at, layout)
    close(SFI.memory_attention(c.q, mem_k, mem_v, held, mask, c.scale, c.softcap, c.sinks), c.exact())


@pytest.mark.parametrize("queries", [1, 3])
def test_append_of_several_tokens(queries: int) -> None:
    """One slot a token and row, each counted from the row's own refresh; heads keep their own tokens."""
    batch, heads, slots, selected_end, recent = 2, 3, 12, 4, 2
    held = torch.full((batch, heads, slots), -1)
    mem_k, mem_v = torch.zeros(batch, heads, slots, 5), torch.zeros(batch, heads, slots, 2)
    new_k, new_v = torch.randn(batch, heads, queries, 5), torch.randn(batch, heads, queries, 2)
    position, refreshed_at = torch.arange(10, 10 + queries), torch.tensor([9, 8])
    SFI.append(new_k, new_v, position, refreshed_at, selected_end, recent, held, mem_k, mem_v)
    first = selected_end + recent
    for b, start in enumerate((first, first + 1)):
        assert held[b].tolist() == [[-1] * start + position.tolist() + [-1] * (slots - start - queries)] * heads
        assert torch.equal(mem_k[b, :, start : start + queries], new_k[b])
        assert torch.equal(mem_v[b, :, start : start + queries], new_v[b])
        assert mem_k[b, :, :start].eq(0).all()
        assert mem_k[b, :, start + queries :].eq(0).all()
