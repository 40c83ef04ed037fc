"""Inductor's code for a GPU that is not there: lowering, scheduling and code generation run, compilation does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def generated(function: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """The wrapper and kernels that Inductor writes for a function of tensors, on an H100.

    The function may use operators of aten that need no decomposition, and ours.
    """
    import torch._inductor.codegen.cuda.device_op_overrides
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    sizes = {"multi_processor_count": 132, "major": 9, "warp_size": 32, "regs_per_multiprocessor": 65_536}
    threads = {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
    properties = DeviceProperties(type="cuda", index=0, cc=90, **sizes, **threads)
    device = SimpleNamespace(minor=0, name="H100", shared_memory_per_block_optin=232_448, total_memory=1 << 36, **sizes)
    answers = {
        "torch.cuda.current_device": 0,
        "torch.cuda.device_count": 1,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_properties": device,
        "torch.utils._triton.triton_hash_with_backend": "",
        "torch._inductor.codecache.CacheBase.get_system": {"hash": ""},
        "torch._inductor.scheduler.has_triton": True,
    }
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, return_value=answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=properties))
        inputs = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes]
        graph = GraphLowering(make_fx(function)(*inputs), shape_env=mode.shape_env)
        for handler in (V.set_debug_handler(DebugContext()), V.set_graph_handler(graph), V.set_fake_mode(mode)):
            stack.enter_context(handler)
        graph.run(*inputs)
        code = graph.codegen()[0]
    return str(getattr(code, "value", code))
