"""What `sfi eval` decodes: passages of a long text, and what in them must be found again. Imports `lab.errors` only.

A passage is a context and the tokens after it, which are fed one at a time whatever the model would have said.
`natural` goes on with the text; `copy` repeats a part of the context; `lookup` asks for facts strewn over it, `needle`
for one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from sfi_compile.lab.errors import LabError

TASKS = ("natural", "copy", "lookup", "needle")
CUE = 16
"""Tokens before a repeated part that end the context, so that one can know what follows."""
FACTS = 24
"""Most facts of one context; all are asked for, in another order, as far as the tokens go."""
PER_FACT = 128
"""Tokens of a context for each fact, at least."""
FIRST = "Ada Ben Cora Dan Eva Finn Gwen Hugo Iris Jack Kate Liam Mara Noah Olga Paul Rosa Sam Tess Vera".split()
LAST = "Abbot Baker Carver Draper Fisher Glover Hunter Keeler Mason Porter Ryder Sawyer Tanner Turner Weaver".split()


@dataclasses.dataclass(frozen=True)
class Passage:
    """One row of a task."""

    context: tuple[int, ...]
    """Token ids that are there before the first decode step; its last one is fed to that step."""
    targets: tuple[int, ...]
    """Token ids to come, in their order."""
    scored: tuple[bool, ...]
    """Which of the targets count."""


def passages(
    task: str,
    ids: Sequence[int],
    encode: Callable[[str], list[int]],
    context: int,
    new_tokens: int,
    count: int,
    seed: int,
) -> list[Passage]:
    """`count` passages of a task, of disjoint parts of a text; the same arguments give the same passages.

    Args:
        task: one of `TASKS`.
        ids: the text's tokens, `count * (context + new_tokens)` at least.
        encode: text → token ids, without special tokens.
        context: tokens of each context.
        new_tokens: tokens after it, at most.
        count: passages.
        seed: of what is drawn: places, names and numbers.

    Raises:
        LabError: an unknown task, too short a text, or a context in which nothing can be hidden.
    """
    check_task(task)
    size = context + new_tokens
    if len(ids) < count * size:
        raise LabError(
            f"the text has {len(ids)} tokens; {count} passages of {context} + {new_tokens} need {count * size}"
        )
    make = {"natural": _natural, "copy": _copy, "lookup": _lookup, "needle": _needle}[task]
    parts = [list(ids[i * size : (i + 1) * size]) for i in range(count)]
    return [
        make(part, encode, context, new_tokens, random.Random(f"{seed} {task} {i}")) for i, part in enumerate(parts)
    ]


def check_task(task: str) -> None:
    """Raises LabError if there is no such task, with those there are."""
    if task not in TASKS:
        raise LabError(f"--task {task!r}; allowed: {', '.join(TASKS)}")


def _natural(part: list[int], encode: Any, context: int, new_tokens: int, draw: random.Random) -> Passage:
    return Passage(tuple(part[:context]), tuple(part[context:]), (True,) * new_tokens)


def _copy(part: list[int], encode: Any, context: int, new_tokens: int, draw: random.Random) -> Passage:
    room = context - CUE
    if room < new_tokens + 2 * CUE:
        raise LabError(f"--context {context}: task copy needs {new_tokens + 3 * CUE} tokens for {new_tokens} new ones")
    start = draw.randrange(CUE, room - new_tokens)
    text = part[:room]
    repeated = text[start : start + new_tokens]
    return Passage((*text, *text[start - CUE : start]), tuple(repeated), (True,) * new_tokens)


def _lookup(
    part: list[int], encode: Callable[[str], list[int]], context: int, new_tokens: int, draw: random.Random
) -> Passage:
    names = draw.sample(
        [f"{first} {last}" for first in FIRST for last in LAST], min(FACTS, max(context // PER_FACT, 1))
    )
    facts = [
        (encode(f" The code of {name} is"), encode(f" {draw.randrange(10_000, 100_000)}"), encode(".\n"))
        for name in names
    ]
    full = _strewn(part, [q + a + end for q, a, end in facts], context, draw)
    draw.shuffle(facts)
    targets: list[int] = []
    scored: list[bool] = []
    for question, answer, end in facts:
        targets += question + answer + end
        scored += [False] * len(question) + [True] * len(answer) + [False] * len(end)
    return _cut(full, targets, scored, new_tokens)


def _needle(
    part: list[int], encode: Callable[[str], list[int]], context: int, new_tokens: int, draw: random.Random
) -> Passage:
    question, answer = encode(" The secret number of the lighthouse is"), encode(f" {draw.randrange(10_000, 100_000)}")
    full = _strewn(part, [question + answer + encode(".\n")], context, draw)
    return _cut(full, question + answer, [False] * len(question) + [True] * len(answer), new_tokens)


def _strewn(part: list[int], facts: list[list[int]], context: int, draw: random.Random) -> list[int]:
    """`context` tokens: the text with the facts in it, one in each of as many equal stretches, anywhere there."""
    room = context - sum(map(len, facts))
    stretch = room // len(facts)
    if stretch < max(map(len, facts)):
        raise LabError(f"--context {context}: too short to strew {len(facts)} facts over it")
    found: list[int] = []
    for i, fact in enumerate(facts):
        start, stop = i * stretch, (i + 1) * stretch if i + 1 < len(facts) else room
        at = draw.randrange(start, start + stretch)
        found += part[start:at] + fact + part[at:stop]
    return found


def _cut(context: list[int], targets: list[int], scored: list[bool], new_tokens: int) -> Passage:
    if not any(scored[:new_tokens]):
        raise LabError(f"--new-tokens {new_tokens}: the first answer begins after {scored.index(True)} tokens")
    return Passage(tuple(context), tuple(targets[:new_tokens]), tuple(scored[:new_tokens]))
