"""What is told before a slow step, and what captures it; a stand-in plays the GPU's part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sfi_compile import announcement, capture
from sfi_compile.announcement import Announcement

GPU = torch.device("cuda", 1)


class Graph:
    """Does again what was captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def told() -> tuple[dict[str, tuple[torch.Tensor, ...]], torch.Tensor, Announcement]:
    """Two of one type, one of them on two devices."""
    states = {
        "at": (torch.zeros(2, dtype=torch.int64),),
        "flags": (torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)),
        "since": (torch.zeros(2, dtype=torch.int64),),
    }
    zeroed = torch.ones(2, dtype=torch.int64)
    return states, zeroed, Announcement(2, states, (zeroed,))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_announcement_arrives(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def captured(device: torch.device, work: Callable[[], None]) -> Any:
        made.append(device)
        return Graph(work)

    monkeypatch.setattr(announcement, "captured", captured)
    states, zeroed, one = told()
    one.device = GPU if on_gpu else None
    for i in range(4):
        zeroed.fill_(7)
        one.tell({"flags": [i % 2, 1], "since": [10 + i, 20], "at": [i, -i], "more": [0, 0]})
        for state in states["flags"]:
            assert state.tolist() == [i % 2, True]
        assert states["at"][0].tolist() == [i, -i]
        assert states["since"][0].tolist() == [10 + i, 20]
        assert not zeroed.any()
    assert made == [GPU] * on_gpu


def test_a_capture_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([RuntimeError("another thread captures"), None])

    def captured(device: torch.device, work: Callable[[], None]) -> Any:
        error = next(outcomes)
        if error is not None:
            raise error
        return Graph(work)

    monkeypatch.setattr(announcement, "captured", captured)
    states, _, one = told()
    one.device = GPU
    one.tell({"flags": [0, 0], "at": [1, 1], "since": [0, 0]})
    with pytest.raises(RuntimeError, match="another thread"):
        one.tell({"flags": [0, 0], "at": [2, 2], "since": [0, 0]})
    for i in (3, 4):
        one.tell({"flags": [0, 0], "at": [i, i], "since": [0, 0]})
        assert states["at"][0].tolist() == [i, i]


def test_captures_are_made_on_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one on another device, whose stream torch would take again."""
    current = [0]
    begun: list[int] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.device_index = current[0] if device is None else device.index

    @contextlib.contextmanager
    def on(index: int) -> Iterator[None]:
        was, current[0] = current[0], index
        yield
        current[0] = was

    class Captured:
        def capture_begin(self, **_: Any) -> None:
            begun.append(current[0])

        def capture_end(self) -> None:
            pass

    for name, stand_in in (
        ("Stream", Stream), ("stream", lambda s: on(s.device_index)), ("device", lambda d: on(d.index)),
        ("CUDAGraph", Captured), ("synchronize", lambda: None), ("empty_cache", lambda: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    worked = []
    for index in (0, 1, 0):
        capture.captured(torch.device("cuda", index), lambda: worked.append(current[0]))
    assert begun == worked == [0, 1, 0]
    assert current == [0]
