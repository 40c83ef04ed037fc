"""How the kernels that Inductor does not know are launched; or only compiled, ahead of their first launch.

Imports torch; triton comes with the kernels.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

log = logging.getLogger("sfi_compile")
_state = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Run a Triton kernel on a grid; inside `compiling`, compile what that would run, and run nothing."""
    if getattr(_state, "compiling", False):
        kernel.warmup(*args, grid=grid, **settings)
    else:
        kernel[grid](*args, **settings)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """In this thread, kernels are compiled and not run. Tensors may be on the meta device."""
    _state.compiling = True
    try:
        yield
    finally:
        _state.compiling = False


def described(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same sizes, strides and dtype: all that a compilation depends on, but for an
    address, which counts as a multiple of 16 bytes."""
    shape, strides = tuple(map(int, x.shape)), tuple(map(int, x.stride()))
    return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")


@contextlib.contextmanager
def ahead(calls: list[tuple[torch.device, Callable[[], None]]]) -> Iterator[None]:
    """Meanwhile, another thread compiles the kernels that some calls would launch, each on its device; at the end it is
    waited for. What goes wrong there is logged: the first launch will compile, or raise, by itself."""
    if not calls:
        yield
        return

    def work() -> None:
        with compiling():
            for device, call in calls:
                with torch.cuda.device(device):
                    call()

    with ThreadPoolExecutor(1) as pool:
        done: Future[None] = pool.submit(work)
        yield
    error = done.exception()
    if error is not None:
        log.warning("sfi: kernels are compiled at their first launch, not ahead of it: %s", error)
