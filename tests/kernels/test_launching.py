"""Kernels compiled ahead: the very ones that the operators of a slow step launch, in a thread that harms nobody."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sfi_compile.compat.inductor import without_collector
from sfi_compile.kernels import launching
from sfi_compile.passes import ahead
from sfi_compile.passes.lower import Lower
from tests.kernels.triton_tools import needs_triton
from tests.passes.test_lower import two_alike
from tests.passes.toys import compiled

GPU = torch.device("cuda")


class Kernel:
    """Notes whether it was compiled or run."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any, tuple[Any, ...]]] = []

    def warmup(self, *args: Any, grid: Any, **settings: Any) -> None:
        self.found.append(("compiled", grid, args))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **settings: self.found.append(("run", grid, args))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_inside_nothing_runs_and_elsewhere_everything_does() -> None:
    kernel = Kernel()
    inside, outside = threading.Event(), threading.Event()

    def call() -> None:
        launching.launch(kernel, (1,), "ahead")
        inside.set()
        outside.wait(10)

    with launching.ahead([(GPU, call)]):
        assert inside.wait(10)
        launching.launch(kernel, (2,), "meanwhile")
        outside.set()
    launching.launch(kernel, (3,), "after")
    assert [(how, args[0]) for how, _, args in kernel.found] == [
        ("compiled", "ahead"), ("run", "meanwhile"), ("run", "after"),
    ]  # fmt: skip


def test_what_goes_wrong_ahead_is_told_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        raise RuntimeError("no room for a cache")

    with caplog.at_level(logging.WARNING, "sfi_compile"):
        with launching.ahead([(GPU, call)]):
            pass
        assert "at their first launch, not ahead of it: no room for a cache" in caplog.text
        with pytest.raises(KeyError, match="body"), launching.ahead([(GPU, call)]):
            raise KeyError("body")


OF_ALL = {"append", "pack", "put", "sample", "gather", "threshold", "write"}
"""What memories are made with, however scores are."""


@needs_triton
@pytest.mark.parametrize(
    ("preset", "scores"),
    [("balanced", {"add", "carry"}), ("paper-speed", {"evidence", "weigh", "refine"})],
)
def test_the_kernels_of_a_slow_step(preset: str, scores: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sites that are alike, made apart: each operator is compiled once, on descriptions that hold no memory."""
    from sfi_compile.kernels import addresses, attended_cuda, pack_cuda, select_cuda, top_k_cuda
    from sfi_compile.passes import lower

    monkeypatch.setattr(lower, "SCRATCH", 0.0)
    work = Lower(kernels=True).apply(compiled(two_alike(2).module, "verify", preset=preset))
    assert ahead.calls(work) == []  # this is a CPU's graph
    calls = ahead.calls(work, device_type="cpu")
    assert [device.type for device, _ in calls] == ["cpu", "cpu"]
    launched: list[tuple[str, tuple[Any, ...]]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        launched.append((kernel.__name__, args))

    for module in (addresses, attended_cuda, pack_cuda, select_cuda, top_k_cuda):
        monkeypatch.setattr(module, "launch", launch)
    for _, call in calls:
        call()
    assert {name for name, _ in launched} == OF_ALL | scores
    tensors = [x for _, args in launched for x in args if isinstance(x, torch.Tensor)]
    assert {x.device.type for x in tensors} == {"meta"}


def test_the_collector_rests_and_wakes_up() -> None:
    assert gc.isenabled()
    inside: list[bool] = []

    @without_collector()
    def fail() -> None:
        inside.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
