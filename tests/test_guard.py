"""The guard's questions: what is captured answers like what is asked eagerly. A stand-in plays the GPU's part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sfi_compile import guard
from sfi_compile.guard import Found, GuardInputs, Reader

ROOT, TOKENS, FIRST, SECOND = range(4)


class Replayed:
    """Computes anew at every replay, from the tensors it was made with."""

    made = 0

    def __init__(self, device: torch.device, compute: Callable[[], list[Tensor]], host: Tensor) -> None:
        Replayed.made += 1
        self.compute, self.host = compute, host

    def replay(self) -> Callable[[], list[int]]:
        values = torch.cat(self.compute())
        assert len(values) <= len(self.host)
        return values.tolist


def reader() -> Reader:
    inputs = GuardInputs(
        positions=lambda counter: (counter.reshape(1),), position_arguments=(FIRST,), fixed_positions=(),
        counters=((FIRST, SECOND),), tokens=TOKENS, lengths=(16,), watched=(ROOT,), identical=(), telling=True,
        root=ROOT, axis=2, batch=2, batch_axis=0, queries=1,
    )  # fmt: skip
    status, context = torch.tensor([0, 4]), torch.tensor([7, 3])
    held = torch.tensor([[[0, 1, -1]], [[0, -1, -1]]])
    return Reader(inputs, True, Found((status,), (context,), (held,)))


def step(at: int, root: Tensor, second: int | None = None) -> list[Any]:
    return [root, torch.tensor([[5], [6]]), torch.tensor(at), torch.tensor(at if second is None else second)]


def test_captured_answers_are_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_Captured", Replayed)
    Replayed.made = 0
    root = torch.randn(2, 1, 16, 4)
    asked = reader()
    for at in (3, 4, 5):
        fingerprint = root[:, :, at - 1].clone()
        fingerprint[1] += at == 4
        args = step(at, root, second=at + (at == 5))
        wanted = reader().ask(args, fingerprint, True)()
        inputs = {i: args[i] for i in asked.moving}
        got = asked._parsed(iter(asked._from_gpu(inputs, root, keep(asked, fingerprint), True)()), True, True)
        assert got == wanted
        assert got.spans == ((at, at),)
        assert got.same == (True, at != 4)
        assert got.agree == (at != 5)
        assert got.tokens == ((5,), (6,))
        assert got.found == ((0, 4), (7, 3), (2, 1))
    assert Replayed.made == 1, "the first answer is an eager one, and later ones share a graph"


def test_counters_that_stay_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_Captured", Replayed)
    Replayed.made = 0
    asked, root = reader(), torch.randn(2, 1, 16, 4)
    counters = torch.tensor(3), torch.tensor(3)
    tokens = [torch.tensor([[at], [at + 1]]) for at in range(20)]
    copied: list[int] = []
    foreach_copy = torch._foreach_copy_

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        copied.append(len(targets))
        foreach_copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)

    def ask(at: int, first: Tensor, second: Tensor) -> None:
        first.fill_(at), second.fill_(at)
        args = [root, tokens[at], first, second]
        wanted = reader().ask(args, None, False)()
        inputs = {i: args[i] for i in asked.moving}
        got = asked._parsed(iter(asked._from_gpu(inputs, root, None, False)()), False, False)
        assert got == wanted
        assert got.tokens == ((at,), (at + 1,))

    for at in range(3, 7):
        ask(at, *counters)
    assert Replayed.made == 1
    assert copied == [1, 1, 1], "the tokens alone"
    for at in range(7, 10):  # one of them is another tensor now, and another again
        ask(at, counters[0], torch.tensor(at))
    assert Replayed.made == 2
    assert copied[3:] == [2, 2, 2]


def keep(asked: Reader, fingerprint: Tensor) -> Tensor:
    """The fingerprint where a runner keeps it: always the same tensor."""
    kept = asked.__dict__.setdefault("kept", torch.empty_like(fingerprint))
    assert isinstance(kept, Tensor)
    return kept.copy_(fingerprint)


def test_as_many_are_kept_as_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_Captured", Replayed)
    asked = reader()
    roots = [torch.randn(2, 1, 16, 4) for _ in range(guard.CAPTURED + 2)]
    for root in roots:
        args = step(3, root)
        asked._from_gpu({i: args[i] for i in asked.moving}, root, None, False)
    assert len(asked.captured) == guard.CAPTURED


def test_a_position_that_is_a_number_is_asked_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_Captured", Replayed)
    Replayed.made = 0
    asked, root = reader(), torch.randn(2, 1, 16, 4)
    count = dataclasses.replace(asked.guard, positions=lambda at: (torch.tensor([at]),), counters=(), tokens=None)
    asked = Reader(count, False, asked.found)
    for at in (3, 4, 5):
        assert asked._from_gpu({FIRST: at}, root, None, False)() == [at]
    assert Replayed.made == 0


def test_positions_are_numbers_as_well_as_tensors() -> None:
    root = torch.randn(2, 1, 16, 4)
    inputs = dataclasses.replace(
        reader().guard, positions=lambda at: (at, torch.tensor([at, at + 1]), torch.tensor(at)), counters=(),
        tokens=None, fixed_positions=(7,), lengths=(16, 16, 16, 9), queries=2,
    )  # fmt: skip
    asked = Reader(inputs, False, reader().found)
    for at in (3, 4):
        got = asked.ask([root, None, at, None], root[:, :, at - 1], False)()
        assert got.spans == ((at, at + 1), (at, at + 1), (at, at + 1), (7, 8))
        assert got.same == (True, True)
    with pytest.raises(IndexError, match="position 16 lies outside the cache, which holds 16"):
        asked.ask([root, None, 15, None], None, False)()
    # Whatever row is compared meanwhile, this is what the user reads.
    with pytest.raises(IndexError, match="position 18 lies outside the cache, which holds 16"):
        asked.ask([root, None, 17, None], root[:, :, 3], False)()
