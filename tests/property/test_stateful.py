"""Random interleavings of what users do to sequences; after every action, outputs and memories are the oracle's.

This is where stale memory shows: caches are cropped, reset, reordered, copied and swapped under one compiled decoder,
with tokens fed past it. `World.decode` asserts three things of every row: it is slow where the rules say so, it is
fast where nothing happened to it, and its output is that of the sequence now in the cache either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.tiny_decoder import (
    ALWAYS_SLOW,
    BOUNDARIES,
    CAPPED,
    EINSUM,
    FADING,
    FULL,
    H2O,
    MANY_HEADS,
    ONE_LAYER,
    PYRAMID,
    SHAPES,
    SINKS,
    SIZE,
    SMALL,
    VOCAB,
    Variant,
    eager_lowering,
    papers,
)
from tests.property.world import Session, World

THOROUGH = settings().max_examples > 100
FEW = tuple(SHAPES.values()) if THOROUGH else (SMALL, MANY_HEADS, FULL, ONE_LAYER, CAPPED, EINSUM)
MACHINES = {
    "reach": FEW,
    "sfi": tuple(papers(variant) for variant in FEW),
    "others": (FADING, H2O, PYRAMID, ALWAYS_SLOW) if THOROUGH else (FADING, H2O, PYRAMID),
}
"""By policy, so that each is drawn as often."""
BATCHES = (1, 2)
MOST_SESSIONS = 3
tokens = st.integers(0, VOCAB - 1)
seeds = st.integers(0, 3)


@pytest.fixture(autouse=True, scope="module")
def _eager_lowering() -> Iterator[None]:
    with eager_lowering():
        yield


class Machine(RuleBasedStateMachine):
    """Up to three caches at a time. Lengths and indices are drawn loosely and folded into what is possible."""

    variants: ClassVar[tuple[Variant, ...]]
    """Of which one is drawn."""
    actions: ClassVar[int] = 0
    """Taken on a cache, by all machines of this class."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []

    @initialize(which=st.integers(0, 11), seed=seeds)
    def start(self, which: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.world = World(self.variants[which % len(self.variants)], seed)

    def pick(self, index: int) -> Session:
        type(self).actions += 1
        return self.sessions[index % len(self.sessions)]

    def texts(self, session: Session, text: list[int], count: int) -> list[list[int]]:
        """`count` tokens for every row; the rows differ in some drawings and agree in others."""
        shifts = text[0] % 2
        return [[(t + shifts * b * 5) % VOCAB for t in text[:count]] for b in range(session.batch)]

    # Making caches

    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    @rule(
        batch=st.sampled_from(BATCHES),
        inference=st.booleans(),
        padding=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    )
    def new(self, batch: int, inference: bool, padding: list[int]) -> None:
        # One layer in inference mode is always slow, which the machine need not find out at length.
        inference = inference and self.world.model.variant.layers > 1 and (batch > 1 or THOROUGH)
        self.sessions.append(self.world.new(padding[:batch], inference))
        self.world.feed(self.sessions[-1], self.texts(self.sessions[-1], [7, 5, 3, 9, 8, 6], 6))

    @precondition(lambda self: 0 < len(self.sessions) < MOST_SESSIONS)
    @rule(index=st.integers(0, 5))
    def copy(self, index: int) -> None:
        self.sessions.append(self.world.copy(self.pick(index)))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5))
    def drop(self, index: int) -> None:
        self.sessions.remove(self.pick(index))

    # Feeding

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), text=st.lists(tokens, min_size=1, max_size=7))
    def decode(self, index: int, text: list[int]) -> None:
        session = self.pick(index)
        for step in zip(*self.texts(session, text, session.room), strict=True):
            self.world.decode(session, list(step))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), steps=st.integers(1, 5))
    def decode_greedily(self, index: int, steps: int) -> None:
        session = self.pick(index)
        chosen = [3] * session.batch
        for _ in range(min(steps, session.room)):
            chosen = self.world.decode(session, chosen).argmax(-1).tolist()

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), which=st.integers(0, 2))
    def decode_a_boundary(self, index: int, which: int) -> None:
        session = self.pick(index)
        if session.room:
            self.world.decode(session, [BOUNDARIES[which]] * session.batch)

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), text=st.lists(tokens, min_size=1, max_size=6))
    def feed_past_the_compiler(self, index: int, text: list[int]) -> None:
        session = self.pick(index)
        if session.room:
            self.world.feed(session, self.texts(session, text, session.room))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), text=st.lists(tokens, min_size=3, max_size=3))
    def append_several(self, index: int, text: list[int]) -> None:
        """Several tokens in one step, as drafts are verified; twice, so that the second may be fast."""
        session = self.pick(index)
        for _ in range(2):
            if session.room >= 3 and (session.batch == 1 or THOROUGH):
                self.world.decode_several(session, self.texts(session, text, 3))

    # Changing sequences

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), less=st.integers(1, 9))
    def crop(self, index: int, less: int) -> None:
        session = self.pick(index)
        self.world.crop(session, max(0, session.length - less))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), less=st.integers(1, 3), text=st.lists(tokens, min_size=3, max_size=3))
    def draft_and_reject(self, index: int, less: int, text: list[int]) -> None:
        """Crop, and feed as many tokens again: the position goes on as if nothing had happened."""
        session = self.pick(index)
        if session.length > less:
            self.world.crop(session, session.length - less)
            self.world.feed(session, self.texts(session, text, less))

    @precondition(lambda self: self.sessions)
    @rule(
        index=st.integers(0, 5),
        zero=st.booleans(),
        same_length=st.booleans(),
        text=st.lists(tokens, min_size=4, max_size=4),
    )
    def reset_and_prompt(self, index: int, zero: bool, same_length: bool, text: list[int]) -> None:
        """The same tensors for another text, of the same length perhaps."""
        session = self.pick(index)
        length = max(session.length, 1) if same_length else 4
        self.world.reset(session, session.start.tolist(), zero)
        self.world.feed(session, self.texts(session, (text * SIZE)[:length], length))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 5), order=st.lists(st.integers(0, 5), min_size=2, max_size=2), in_place=st.booleans())
    def reorder(self, index: int, order: list[int], in_place: bool) -> None:
        """As beam search does; rows may be dropped and doubled."""
        session = self.pick(index)
        self.world.reorder(session, [i % session.batch for i in order[: session.batch]], in_place)

    @rule()
    def forget(self) -> None:
        self.world.forget()

    @invariant()
    def caches_hold_what_the_oracle_wrote(self) -> None:
        for session in self.sessions:
            for b, row in enumerate(session.rows):
                inside = slice(row.start, session.length)
                for tensors, expected in ((session.keys, row.keys), (session.values, row.values)):
                    for layer, tensor in enumerate(tensors):
                        difference = tensor[b, :, inside].double() - expected[layer, :, inside]
                        assert difference.abs().le(1e-3).all()


@pytest.mark.parametrize("policy", MACHINES)
def test_random_interleavings(policy: str) -> None:
    steps, examples = 100 if THOROUGH else 30, settings().max_examples // 2
    machine = type(Machine.__name__, (Machine,), {"variants": MACHINES[policy], "actions": 0})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=steps, max_examples=examples))
    assert machine.actions >= (5_000 if THOROUGH else 50)


# The shortest interleavings that would find a memory of another text


Act = Callable[[World, Session], Session]


def other(world: World, session: Session, length: int, offset: int = 4) -> Session:
    """A new cache with another prompt."""
    fresh = world.new(session.start.tolist(), session.inference)
    world.feed(fresh, [[3 + (i * offset) % 8 for i in range(length)] for _ in range(session.batch)])
    return fresh


def reset_to(length_of: Callable[[int], int]) -> Act:
    def act(world: World, session: Session) -> Session:
        length = length_of(session.length)
        world.reset(session, session.start.tolist(), zero=True)
        world.feed(session, [[4 + (i * 3) % 7 for i in range(length)]] * session.batch)
        return session

    return act


def crop_and_feed(world: World, session: Session) -> Session:
    world.crop(session, session.length - 2)
    world.feed(session, [[9, 5]] * session.batch)
    return session


def crop(count: int) -> Act:
    def act(world: World, session: Session) -> Session:
        world.crop(session, session.length - count)
        return session

    return act


def feed(count: int, through_compiled: bool) -> Act:
    def act(world: World, session: Session) -> Session:
        world.feed(session, [[9, 5, 4][:count]] * session.batch, through_compiled)
        return session

    return act


def swap_rows(world: World, session: Session) -> Session:
    world.reorder(session, list(range(session.batch))[::-1], in_place=False)
    return session


def double_a_row(world: World, session: Session) -> Session:
    world.reorder(session, [0] * session.batch, in_place=True)
    return session


ACTS: dict[str, Act] = {
    "another cache of the same length": lambda w, s: other(w, s, s.length),
    "another cache, one longer": lambda w, s: other(w, s, s.length + 1),
    "reset, a prompt of the same length": reset_to(lambda n: n),
    "reset, a prompt one longer": reset_to(lambda n: n + 1),
    "reset, a short prompt": reset_to(lambda n: 2),
    "crop one": crop(1),
    "crop three": crop(3),
    "crop two and feed two": crop_and_feed,
    "feed one past the compiler": feed(1, False),
    "feed three at once": feed(3, True),
    "swap rows": swap_rows,
    "double a row": double_a_row,
}


@pytest.mark.parametrize("variant", [SMALL, papers(SMALL), H2O], ids=["reach", "sfi", "h2o"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_no_memory_of_another_text(act: Act, inference: bool, variant: Variant) -> None:
    """Nor a history of it."""
    world = World(variant)
    session = world.new([0, 1], inference)
    world.feed(session, [[3, 4, 5, 6, 7, 8, 9, 10, 3, 5], [10, 9, 7, 5, 3, 4, 4, 8, 6, 5]])
    for i in range(3):
        world.decode(session, [4 + i, 6 + i])
    session = act(world, session)
    slow = world.slow_rows
    for i in range(3):
        world.decode(session, [7 + i, 3 + i])
    # The first step after it is slow, for every row that has another text.
    assert world.slow_rows - slow >= (1 if act is double_a_row and inference else 2)


@pytest.mark.parametrize("policy", ["reach", "sfi"])
@pytest.mark.parametrize("variant", [SMALL, CAPPED, SINKS, EINSUM], ids=["small", "softcap", "sinks", "all of them"])
def test_padding_that_is_fed(variant: Variant, policy: str) -> None:
    """It may attend to nothing, so there is nothing to keep of it; where it sees all slots alike, nor beside it."""
    world = World(dataclasses.replace(variant, policy=policy))
    one, several = world.new([2]), world.new([2])
    for token in range(5):
        world.decode(one, [token])
    world.decode_several(several, [[3, 4, 5]])
    assert world.memories
    assert world.slow_rows > 1


def test_two_caches_by_turns() -> None:
    """Every switch costs a slow step; a run on one cache does not."""
    world = World(SMALL)
    first = world.new([0])
    world.feed(first, [[3, 4, 5, 6, 7, 8, 9, 10]])
    second = other(world, first, 8)
    for _ in range(4):
        world.decode(first, [5])
        world.decode(second, [5])
    assert (world.slow_rows, world.fast_rows) == (8, 0)
    for _ in range(3):
        world.decode(second, [6])
    assert world.fast_rows == 3


# The keys of a single layer depend on token and position alone, so the fingerprint says nothing of the text before.


@pytest.mark.parametrize("inference", [False, True])
def test_two_caches_that_one_layer_cannot_tell_apart(inference: bool) -> None:
    world = World(ONE_LAYER)
    first, second = (world.new([0], inference) for _ in range(2))
    world.feed(first, [[3, 4, 5, 6, 7, 8, 9, 10]])
    world.feed(second, [[9, 10, 9, 10, 9, 10, 9, 10]])
    world.decode(first, [5])
    world.feed(second, [[5]])
    world.decode(second, [6])
    assert world.slow_rows == 2


@pytest.mark.parametrize("inference", [False, True])
def test_a_text_changed_in_place_before_its_last_token(inference: bool) -> None:
    world = World(ONE_LAYER)
    session = world.new([0], inference)
    world.feed(session, [[3, 4, 5, 6, 7, 8, 9, 10]])
    world.decode(session, [5])
    world.crop(session, 4)
    world.feed(session, [[3, 9, 3, 9]])
    world.feed(session, [[5]])  # alone, so that its key is the same to the last bit
    world.decode(session, [6])
    assert world.slow_rows == 2
