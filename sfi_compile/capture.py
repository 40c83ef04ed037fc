"""Capturing what the runtime itself asks of a GPU, beside the CUDA graphs of the step. Imports torch only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_lock = threading.Lock()  # a process captures one graph at a time


def captured(device: torch.device, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `work` launches on a GPU; waits for the device, as every capture does.

    On a stream of its own: the one that `torch.cuda.graph` takes by itself is on the device on which the process
    captured first, and entering it leaves this one.
    """
    graph = torch.cuda.CUDAGraph()
    with _lock, torch.cuda.device(device):
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    return graph
