"""`sfi::select`, `sfi::pack`, `sfi::append`: which positions a memory holds, and that it holds their keys and values.

Uninitialised memory and all context that must not be read hold NaN, as in the tests of attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sfi_compile.config import Config, SelectorSpec
from sfi_compile.kernels import reference, support
from sfi_compile.ops import RowStatus, device
from tests.kernels.cases import Attention, attentions, dense, frame, poisoned_empty

NEAR_TIE = 1e-3
"""Scores closer than this may swap: the oracle's are float64. How exact scores are is the subject of `refreshes`."""


@pytest.fixture(autouse=True, scope="module")
def _poisoned_empty() -> Iterator[None]:
    with poisoned_empty():
        yield


@dataclasses.dataclass(frozen=True)
class Memory:
    """State of one site, its slots filled with a mark so that every write shows."""

    held: Tensor
    mem_k: Tensor
    mem_v: Tensor

    @classmethod
    def marked(cls, case: Attention, config: Config) -> Memory:
        batch, kv_heads, size, key_dim = case.k.shape
        slots = config.sink + min(config.k_head, size) + config.recent + config.refresh_interval
        held = torch.full((batch, kv_heads, slots), 12345)
        mem_k = torch.full((batch, kv_heads, slots, key_dim), 99.0, dtype=case.k.dtype)
        return cls(held, mem_k, torch.full((*held.shape, case.v.shape[-1]), 99.0, dtype=case.v.dtype))

    def copy(self) -> Memory:
        return Memory(self.held.clone(), self.mem_k.clone(), self.mem_v.clone())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.held, self.mem_k, self.mem_v

    def positions(self, b: int, h: int) -> list[int]:
        """What a row's head holds, ascending; no position may be held twice."""
        found = sorted(t for t in self.held[b, h].tolist() if t >= 0)
        assert len(found) == len(set(found))
        return found

    def assert_holds(self, k: Tensor, v: Tensor, b: int) -> None:
        """Every slot of a row has the keys and values of its position; an empty one has zeros."""
        for h in range(self.held.shape[1]):
            for slot, t in enumerate(self.held[b, h].tolist()):
                for mem, source in ((self.mem_k, k), (self.mem_v, v)):
                    assert torch.equal(
                        mem[b, h, slot], source[b, h, t] if t >= 0 else torch.zeros_like(source[b, h, 0])
                    )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    return Config.from_options(
        {
            "preset": "paper-speed",
            "sink": draw(st.integers(0, 4)),
            "recent": draw(st.integers(1, 9)),
            "k_head": draw(st.sampled_from([1, 2, 5, 70])),
            "refresh_interval": draw(st.integers(1, 5)),
            "nms_window": draw(st.sampled_from([0, 4, 32])),
        }
    )


def refresh(case: Attention, config: Config, memory: Memory, status: Tensor | None = None) -> Tensor:
    """Run `select` and `pack` as the slow branch does; the selected positions."""
    _, logits, found, _ = dense(case)
    status = found if status is None else status
    extent, log_position, held = frame(case, config)
    spec = config.selector().to_text()
    selected: Tensor = torch.ops.sfi.select(logits, case.k, case.slow_rows, status, extent, log_position, spec)
    operands = (case.k, case.v, selected, held, case.slow_rows, status, config.sink)
    torch.ops.sfi.pack(*operands, *memory.tensors())
    return selected


def one_position(case: Attention) -> Attention:
    """The rows of a step share its position, so rows of other lengths are not slow."""
    slow = case.slow_rows & (torch.tensor(case.lengths) == max(case.lengths))
    k, v = case.k.clone(), case.v.clone()
    k[~slow], v[~slow] = math.nan, math.nan
    return dataclasses.replace(case, k=k, v=v, slow_rows=slow)


def near_best(case: Attention, b: int, spec: SelectorSpec, chosen: list[list[int]]) -> None:
    """The oracle's selection, or one that differs from it only between near ties."""
    k, _ = case.clean()
    logits = reference.logits(case.q[b], k[b], case.mask_of(b), case.scale)
    allowed = case.allowed(b)
    cand = reference.candidates(allowed, case.lengths[b] - 1, spec.sink, spec.recent)
    # Several queries may each be blocked where the last is not; the oracle's rows are finite at every candidate.
    assume(bool((logits[:, :, cand] > -1e4).all()))
    scores = reference.score(logits, k[b], allowed, cand, spec)
    for of_head, found in zip(scores, chosen, strict=True):
        best = reference.best(of_head, cand, spec.k_head)
        assert len(found) == len(best)
        disputed = [*(set(found) ^ set(best))]
        assert all(abs(of_head[t] - of_head[best].min()) < NEAR_TIE for t in disputed), (found, best)


@given(attentions(queries=1), configs())
def test_a_refresh_gives_the_oracles_support(case: Attention, config: Config) -> None:
    case, spec = one_position(case), config.selector()
    memory = Memory.marked(case, config)
    selected = refresh(case, config, memory)
    assert selected.shape == (*case.k.shape[:2], min(config.k_head, case.k.shape[2]))
    k, v = case.clean()
    for b in range(case.k.shape[0]):
        if b not in case.slow:
            assert selected[b].eq(-1).all()
            continue
        chosen = [[t for t in row if t >= 0] for row in selected[b].tolist()]
        assert all(row == sorted(set(row)) for row in chosen)
        near_best(case, b, spec, chosen)
        expected = reference.support(case.allowed(b), case.lengths[b] - 1, chosen, spec)
        assert [memory.positions(b, h) for h in range(k.shape[1])] == expected
        memory.assert_holds(k, v, b)


@given(attentions(), configs(), st.data())
def test_only_rows_that_are_slow_and_ready_are_written(case: Attention, config: Config, data: st.DataObject) -> None:
    case = one_position(case)
    batch = case.k.shape[0]
    status = torch.tensor(
        data.draw(st.lists(st.sampled_from(list(map(int, RowStatus))), min_size=batch, max_size=batch))
    )
    memory = Memory.marked(case, config)
    before = memory.copy()
    selected = refresh(case, config, memory, status)
    for b in range(batch):
        if b in case.slow and status[b] == RowStatus.READY:
            assert memory.held[b].lt(case.k.shape[2]).all()
            assert memory.mem_k[b].isfinite().all()
        else:
            assert selected[b].eq(-1).all()
            for now, then in zip(memory.tensors(), before.tensors(), strict=True):
                assert torch.equal(now[b], then[b])


@given(attentions(queries=1), configs(), st.integers(0, 5))
def test_the_recent_segment_grows_by_every_token(case: Attention, config: Config, steps: int) -> None:
    """Anchored at the refresh: no token falls between the window and the selection."""
    case = one_position(case)
    assume(case.slow)
    memory = Memory.marked(case, config)
    refresh(case, config, memory)
    p0 = max(case.lengths) - 1
    first = [memory.positions(case.slow[0], h) for h in range(case.k.shape[1])]
    g = torch.Generator().manual_seed(steps)
    batch, kv_heads, size, _ = case.k.shape
    k, v = case.clean()
    k, v = (torch.cat([x, torch.randn(*x.shape[:2], 6, x.shape[3], generator=g).to(x.dtype)], dim=2) for x in (k, v))
    refreshed_at = torch.full((batch,), p0)
    selected_end = config.sink + min(config.k_head, size)
    for p in range(p0 + 1, p0 + 1 + min(steps, config.refresh_interval)):
        token = (k[:, :, p : p + 1], v[:, :, p : p + 1], torch.tensor([p]), refreshed_at)
        torch.ops.sfi.append(*token, selected_end, config.recent, *memory.tensors())
        for h in range(kv_heads):
            assert memory.positions(case.slow[0], h) == first[h] + list(range(p0 + 1, p + 1))
        memory.assert_holds(k, v, case.slow[0])


@pytest.mark.parametrize("refreshed_at", [-3, 0, 50, 10_000])
def test_appending_to_a_row_without_memory_stays_inside_it(refreshed_at: int) -> None:
    held, mem = torch.full((1, 1, 9), -1), torch.zeros(1, 1, 9, 2)
    new = torch.ones(1, 1, 1, 2)
    torch.ops.sfi.append(new, new, torch.tensor([20]), torch.tensor([refreshed_at]), 4, 3, held, mem, mem.clone())
    assert held.eq(20).sum() == 1


def test_rows_refreshed_at_different_steps_append_to_their_own_slots() -> None:
    held, mem_k = torch.full((2, 1, 8), -1), torch.zeros(2, 1, 8, 1)
    new = torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1)
    torch.ops.sfi.append(new, new, torch.tensor([11]), torch.tensor([10, 8]), 2, 2, held, mem_k, mem_k.clone())
    assert held[:, 0].tolist() == [[-1, -1, -1, -1, 11, -1, -1, -1], [-1, -1, -1, -1, -1, -1, 11, -1]]
    assert mem_k[:, 0, :, 0].tolist() == [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2, 0]]


# The pieces, against the oracle's words for them


@given(
    st.lists(st.booleans(), min_size=1, max_size=30).map(torch.tensor),
    st.integers(0, 5),
    st.integers(1, 35),
    st.integers(1, 3),
    st.data(),
)
def test_slots_in_their_layout(allowed: Tensor, sink: int, recent: int, heads: int, data: st.DataObject) -> None:
    position = len(allowed) - 1
    cand = reference.candidates(allowed, position, sink, recent)
    assert torch.equal(support.candidates(allowed, position, sink, recent), cand)
    pool = cand.nonzero().flatten().tolist()
    chosen = [sorted(data.draw(st.sets(st.sampled_from(pool)))) if pool else [] for _ in range(heads)]
    k = max(map(len, chosen)) + 1
    selected = torch.tensor([row + [-1] * (k - len(row)) for row in chosen])
    slots = sink + k + recent + 4
    held = support.frame(allowed, position, sink, recent, sink + k, slots).repeat(heads, 1)
    assert held[:, sink : sink + k].eq(-1).all()
    held[:, sink : sink + k] = selected
    expected: Any = reference.support(
        allowed, position, chosen, dataclasses.replace(Config().selector(), sink=sink, recent=recent)
    )
    for h in range(heads):
        assert sorted(t for t in held[h].tolist() if t >= 0) == expected[h]
        assert torch.equal(held[h, sink : sink + k], selected[h])
        for slot, t in enumerate(held[h, sink + k :].tolist()):
            assert t in (-1, position - recent + 1 + slot)
    assert held[:, sink + k + recent :].eq(-1).all()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1536, 5000])
def test_counts_in_runs_are_cumulative_sums(size: int) -> None:
    flags = torch.rand(4, size, generator=torch.Generator().manual_seed(size)) < 0.3
    flags[2], flags[3] = False, True
    found = support.running_count(flags)
    assert found.dtype == torch.int64
    assert torch.equal(found, flags.cumsum(-1))
    for count in (0, 1, 4, 256, 257, 6000):
        places = support.first_places(flags, count)
        assert places.shape == (4, count)
        for row, own in zip(places, flags, strict=True):
            set_at = own.nonzero().flatten()[:count].tolist()
            assert row.tolist() == set_at + [-1] * (count - len(set_at))


@pytest.mark.parametrize(("size", "sink"), [(40, 3), (512, 0), (512, 8), (1000, 3), (1000, 300)])
def test_frames_compile(size: int, sink: int) -> None:
    """What a GPU's slow graph holds of `sfi::frame` is compiled by Inductor; here, for a CPU."""
    spec = Config.from_options({"sink": sink, "recent": 16}).selector().to_text()
    mask = torch.rand(2, 1, 1, size, generator=torch.Generator().manual_seed(0)) < 0.5
    slow_rows, position = torch.tensor([True, True]), torch.tensor([size - 2])

    def frame(*values: Tensor) -> tuple[Tensor, ...]:
        return device.frame(*values, spec, sink + 8, sink + 37)

    traced = make_fx(frame)(mask, slow_rows, position)
    found = torch.compile(traced, backend="inductor", fullgraph=True)(mask, slow_rows, position)
    for own, expected in zip(found, frame(mask, slow_rows, position), strict=True):
        torch.testing.assert_close(own, expected)
