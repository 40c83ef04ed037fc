"""Slow step = dense; fast step = attention over the explicit support. One sequence of decode steps at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sfi_compile
from tests.property.tiny_decoder import (
    ALWAYS_SLOW,
    FULL,
    FULL_H2O,
    FULL_PYRAMID,
    NOT_STRICT,
    SIZE,
    SMALL,
    VARIANTS,
    VOCAB,
    Variant,
    eager_lowering,
    papers,
)
from tests.property.world import TOLERANCE, Session, World

tokens = st.integers(0, VOCAB - 1)
seeds = st.integers(0, 2**32 - 1)
fewer = settings(max_examples=max(6, settings().max_examples // 5))
Story = tuple[int, list[int], list[list[int]], list[list[int]]]


@pytest.fixture(autouse=True, scope="module")
def _eager_lowering() -> Iterator[None]:
    with eager_lowering():
        yield


def texts(draw: st.DrawFn, batch: int, most: int, least: int = 0) -> list[list[int]]:
    length = draw(st.integers(least, most))
    return [draw(st.lists(tokens, min_size=length, max_size=length)) for _ in range(batch)]


@st.composite
def stories(draw: st.DrawFn, batches: tuple[int, ...] = (1, 2)) -> Story:
    """Seed of the weights, first slot of each row, prompt, and the tokens of the steps."""
    batch = draw(st.sampled_from(batches))
    prompt = texts(draw, batch, 16)
    starts = [draw(st.integers(0, max(len(prompt[0]) - 1, 0))) for _ in range(batch)]
    return draw(seeds), starts, prompt, texts(draw, batch, 20, 1)


def begin(world: World, starts: list[int], prompt: list[list[int]], inference: bool = False) -> Session:
    session = world.new(starts, inference)
    if prompt[0]:
        world.feed(session, prompt)
    return session


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@settings(max_examples=max(8, settings().max_examples // 3))
@given(stories())
def test_every_step_is_the_oracles(variant: Variant, story: Story) -> None:
    seed, starts, prompt, fed = story
    world = World(variant, seed)
    session = begin(world, starts, prompt)
    for step in zip(*fed, strict=True):
        world.decode(session, list(step))
    assert world.slow_rows >= session.batch
    if variant is ALWAYS_SLOW:
        assert world.fast_rows == 0
    if variant in (SMALL, papers(SMALL)) and len(fed[0]) > 1:
        assert world.fast_rows > 0  # the first token after a refresh never triggers


def eager(world: World, session: Session, step: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The decoder's own step on a copy of the cache: dense."""
    keys, values = ([t.to(dtype, copy=True) for t in tensors] for tensors in (session.keys, session.values))
    with torch.no_grad():
        model = world.model.to(dtype)
        position = torch.tensor([session.length])
        logits: Tensor = model(torch.tensor(step)[:, None], keys, values, position, session.start)[:, 0]
        world.model.to(torch.float32)
    return logits


@fewer
@given(stories(batches=(2,)))
def test_a_slow_step_is_as_exact_as_the_decoders_own(story: Story) -> None:
    seed, starts, prompt, fed = story
    world = World(ALWAYS_SLOW, seed)
    session = begin(world, starts, prompt)
    for step in zip(*fed, strict=True):
        exact = eager(world, session, list(step), torch.float64)
        own = eager(world, session, list(step))
        out = world.decode(session, list(step))
        floor = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (out - exact).abs().max() <= 2 * (own - exact).abs().max() + floor


@pytest.mark.parametrize(
    "variant", [FULL, papers(FULL), FULL_H2O, FULL_PYRAMID], ids=["reach", "sfi", "h2o", "pyramidkv"]
)
@fewer
@given(stories(batches=(2,)))
def test_a_full_budget_is_dense(variant: Variant, story: Story) -> None:
    seed, starts, prompt, fed = story
    world = World(variant, seed)
    session = begin(world, starts, prompt)
    for step in zip(*fed, strict=True):
        own = eager(world, session, list(step))
        out = world.decode(session, list(step))
        assert (out - own).abs().max() <= TOLERANCE * own.abs().max()
    for memory in (m for rows in world.memories.values() for m in rows if m is not None):
        everything = list(range(memory.row.start, session.length))
        assert all(held == everything for layer in memory.grown(session.length - 1) for held in layer)


def run_of(world: World, session: Session, count: int, token: int = 5) -> list[Tensor]:
    return [world.decode(session, [token + i % 3] * session.batch) for i in range(count)]


def prompt_of(batch: int, length: int) -> list[list[int]]:
    return [[3 + (i * (b + 2)) % 8 for i in range(length)] for b in range(batch)]


@pytest.mark.parametrize("variant", [SMALL, papers(SMALL)], ids=["reach", "sfi"])
def test_a_row_that_is_not_finite_stays_dense_and_disturbs_no_other(variant: Variant) -> None:
    """Nor does it get a memory, until its sequence is finite again."""
    world = World(variant)
    session = begin(world, [0, 2], prompt_of(2, 12))
    healthy = world.copy(session)
    position = torch.tensor([12])
    clean = []
    for i in range(12):
        clean.append(world.decode(healthy, [3 + i % 3, 6 + i % 3])[1])
    world.forget()
    session.keys[0][0, 0, 4] = math.nan
    before = sfi_compile.stats()
    for i in range(12):
        position = torch.tensor([12 + i])
        with torch.no_grad():
            step = torch.tensor([[3 + i % 3], [6 + i % 3]])
            out = world.call(step, session.keys, session.values, position, session.start)[:, 0]
        assert out[0].isnan().all()
        assert torch.equal(out[1], clean[i])
    after = sfi_compile.stats()
    assert after.triggers["invalid"] - before.triggers["invalid"] == 12 + 1
    assert after.slow_steps - before.slow_steps == 12
    session.keys[0][0, 0, 4] = 0.0


@pytest.mark.parametrize("position", [SIZE, SIZE + 7])
def test_a_position_outside_the_cache_is_an_error_that_says_so(position: int) -> None:
    world = World(SMALL)
    session = begin(world, [0], prompt_of(1, 8))
    run_of(world, session, 3)
    step = (torch.tensor([[4]]), session.keys, session.values, torch.tensor([position]), session.start)
    with torch.no_grad(), pytest.raises(IndexError, match=f"position {position} .*{SIZE} positions.*max_cache_len"):
        world.call(*step)
    run_of(world, session, 3)


def test_the_last_slot_of_a_cache_can_be_used() -> None:
    world = World(SMALL)
    session = begin(world, [0, 0], prompt_of(2, SIZE - 3))
    run_of(world, session, 3)
    assert session.room == 0


def test_a_step_that_fails_leaves_no_memory_behind() -> None:
    world = World(SMALL)
    session = begin(world, [0], prompt_of(1, 12))
    run_of(world, session, 3)
    with torch.no_grad(), pytest.raises(IndexError):
        world.call(torch.tensor([[VOCAB]]), session.keys, session.values, torch.tensor([15]), session.start)
    world.memories.clear()  # every row must be slow now, and its history begin anew
    world.pasts.clear()
    run_of(world, session, 3)
    assert world.fast_rows > 0


def test_gradients_leave_the_decoder_to_inductor() -> None:
    world = World(NOT_STRICT)
    session = begin(world, [0], prompt_of(1, 8))
    before = sfi_compile.stats()
    world.model.head.weight.requires_grad_(True)
    own = eager(world, session, [4])
    step = (torch.tensor([[4]]), session.keys, session.values, torch.tensor([8]), session.start)
    out = world.call(*step)
    world.model.head.weight.requires_grad_(False)
    assert out.requires_grad
    torch.testing.assert_close(out[:, 0].detach(), own)
    after = sfi_compile.stats()
    assert "gradients" in {rejection.code for rejection in after.rejections}
    same = {"memory_bytes": 0, "rejections": ()}
    assert dataclasses.replace(after, **same) == dataclasses.replace(before, **same)
