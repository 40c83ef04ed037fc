"""Who is slow: `trigger` and `refreshed` against a literal restatement of the rules, over whole texts.

The restatement keeps the history of a row instead of a state: which positions refreshed, and why.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfi_compile.config import Config
from sfi_compile.triggers import Row, Trigger, refreshed, trigger


@st.composite
def configs(draw: st.DrawFn) -> Config:
    return Config.from_options(
        {
            "refresh_interval": draw(st.integers(1, 9)),
            "min_refresh_gap": draw(st.integers(0, 10)),
            "sentence_cooldown": draw(st.integers(0, 6)),
        }
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a row: what it is fed, and what became of the sequence before it."""

    boundary: bool
    broken: bool
    """The sequence is not the one that the memory was built from, or there is no memory."""
    short: bool = False
    """The row is too short for a memory: a slow step that refreshes nothing."""


steps = st.lists(st.builds(Step, st.booleans(), st.sampled_from([False] * 7 + [True]), st.just(False)), max_size=40)
with_short = st.lists(st.builds(Step, st.booleans(), st.just(False), st.booleans()), max_size=20)


def expected(history: dict[int, Trigger], position: int, step: Step, config: Config) -> Trigger | None:
    """The rules, word by word. `history`: the refreshes since the row's last break, by position."""
    # "a row is slow when its memory is invalid,"
    if step.broken or not history:
        return Trigger.INVALID
    p0 = max(history)
    # "or when p - p0 >= refresh_interval,"
    if position - p0 >= config.refresh_interval:
        return Trigger.INTERVAL
    # "or when the token fed into this step is a boundary token and p - p0 >= min_refresh_gap;"
    # boundaries within `sentence_cooldown` steps after a boundary refresh are ignored.
    cooling = history[p0] is Trigger.BOUNDARY and position - p0 <= config.sentence_cooldown
    if step.boundary and position - p0 >= config.min_refresh_gap and not cooling:
        return Trigger.BOUNDARY
    return None


def run(config: Config, start: int, text: list[Step]) -> list[tuple[int, Trigger | None]]:
    """Feed a text to the product, and hold every answer to the rules."""
    row, history, answers = Row(), dict[int, Trigger](), []
    for position, step in enumerate(text, start=start):
        why = trigger(row, config, position, not step.broken, step.boundary)
        assert why is expected(history, position, step, config), (position, history)
        answers.append((position, why))
        if why is None:
            continue
        if step.short:
            row.valid = False
            history.clear()
            continue
        refreshed(row, config, position, why)
        history[position] = why
    return answers


@given(configs(), st.integers(0, 10_000), steps)
def test_every_step_of_a_text(config: Config, start: int, text: list[Step]) -> None:
    answers = run(config, start, text)
    slow = [position for position, why in answers if why is not None]
    assert all(b - a <= config.refresh_interval for a, b in itertools.pairwise(slow))
    assert not text or answers[0][1] is Trigger.INVALID


@given(configs(), st.integers(0, 100), with_short)
def test_a_row_without_memory_is_slow_until_it_gets_one(config: Config, start: int, text: list[Step]) -> None:
    answers = run(config, start, text)
    for i in range(1, len(text)):
        if text[i - 1].short and answers[i - 1][1] is not None:
            assert answers[i][1] is Trigger.INVALID


@given(configs(), st.integers(0, 100), st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 1000))
def test_positions_are_relative(config: Config, start: int, text: list[bool], shift: int) -> None:
    here = run(config, start, [Step(b, False) for b in text])
    there = run(config, start + shift, [Step(b, False) for b in text])
    assert [(p + shift, why) for p, why in here] == there


@given(configs(), st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_boundary_never_makes_two_refreshes_closer_than_the_gap(config: Config, text: list[bool]) -> None:
    slow = [(p, why) for p, why in run(config, 0, [Step(b, False) for b in text]) if why is not None]
    for (before, reason), (after, why) in itertools.pairwise(slow):
        if why is Trigger.BOUNDARY:
            assert text[after]
            assert after - before >= config.min_refresh_gap
            assert after - before < config.refresh_interval
            assert reason is not Trigger.BOUNDARY or after - before > config.sentence_cooldown
        else:
            assert after - before == config.refresh_interval


CONFIG = Config.from_options({"refresh_interval": 32, "min_refresh_gap": 16, "sentence_cooldown": 2})


@pytest.mark.parametrize(
    ("since", "boundary", "why"),
    [
        (1, True, None),
        (15, True, None),
        (16, True, Trigger.BOUNDARY),
        (16, False, None),
        (31, False, None),
        (31, True, Trigger.BOUNDARY),
        (32, False, Trigger.INTERVAL),
        (32, True, Trigger.INTERVAL),
        (33, False, Trigger.INTERVAL),
    ],
)
def test_the_defaults_by_hand(since: int, boundary: bool, why: Trigger | None) -> None:
    row = Row(valid=True, refreshed_at=100)
    assert trigger(row, CONFIG, 100 + since, True, boundary) is why
    assert trigger(row, CONFIG, 100 + since, False, boundary) is Trigger.INVALID


def test_the_cooldown_counts_from_a_boundary_refresh_alone() -> None:
    config = dataclasses.replace(CONFIG, min_refresh_gap=0)
    for why, first in ((Trigger.BOUNDARY, 13), (Trigger.INTERVAL, 11), (Trigger.INVALID, 11)):
        row = Row()
        refreshed(row, config, 10, why)
        boundaries = [p for p in range(11, 20) if trigger(row, config, p, True, True) is Trigger.BOUNDARY]
        assert boundaries[0] == first
    row = Row()
    refreshed(row, config, 10, Trigger.BOUNDARY)
    refreshed(row, config, 11, Trigger.INVALID)
    assert trigger(row, config, 12, True, True) is Trigger.BOUNDARY


def test_a_new_row_has_no_memory() -> None:
    assert trigger(Row(), CONFIG, 0, True, False) is Trigger.INVALID
