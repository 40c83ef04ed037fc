"""Inductor's code for a GPU that is not there: lowering, scheduling and code generation run, compilation does not."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map


@contextlib.contextmanager
def _h100() -> Iterator[None]:
    """What Inductor asks of a GPU, answered for one."""
    from torch._inductor.runtime.hints import DeviceProperties

    importlib.import_module("torch._inductor.codegen.cuda.device_op_overrides")  # registers the device
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
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, return_value=answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=properties))
        yield


def _code(graph_module: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> str:
    """What Inductor writes for a graph of aten on the fake GPU; inside `_h100`."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph = GraphLowering(graph_module, shape_env=mode.shape_env)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(graph), V.set_fake_mode(mode):
        graph.run(*inputs)
        code = graph.codegen()[0]
    return str(getattr(code, "value", code))


def generated(function: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """The wrapper and kernels that Inductor writes for a function of tensors, on an H100.

    The function may use operators of aten that need no decomposition, and ours.
    """
    with FakeTensorMode() as mode, _h100():
        inputs = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes]
        return _code(make_fx(function)(*inputs), inputs, mode)


def generated_for(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The same for a graph of the backend that was traced on a CPU: as if all of it had been on the GPU.

    `inputs` are what Dynamo gave, and fake values of the inputs added; caches are written where they are.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    found: list[str] = []

    def compile_inner(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mode: Any = detect_fake_mode(inputs)
        with V.set_fake_mode(mode):
            joint_graph_passes(graph_module)
            post_grad_passes(graph_module, True)

        def moved(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cuda:0")
            if not isinstance(x, Tensor):
                return x
            with mode:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")

        for node in graph_module.graph.nodes:
            node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, node.kwargs)
            node.meta = {key: tree_map(moved, x) if key == "val" else x for key, x in node.meta.items()}
        graph_module.recompile()
        with _h100():
            found.append(_code(graph_module, [moved(x) for x in inputs], mode))
        return make_boxed_func(lambda *_: None)

    with torch.no_grad():
        aot_module_simplified(
            module,
            list(inputs),
            fw_compiler=compile_inner,
            inference_compiler=compile_inner,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
    return found[0]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch in a wrapper that Inductor wrote."""

    name: str
    numbers: tuple[int, ...]
    """The whole numbers among its arguments: sizes of what it works on, or its grid."""


def launches(code: str) -> list[Launch]:
    """What a wrapper launches, in its order; of operators without a lowering, one launch each."""
    found = []
    for line in code[code.index("def call(") :].splitlines():
        call = re.search(r"(?:= |^\s*)(?:extern_kernels\.)?(torch\.ops\.[\w.]+|\w+)(\.run)?\((.*)\)", line)
        if call and (call[2] or call[1].startswith("torch.ops.") or "extern_kernels." in line):
            numbers = re.findall(r"(?<=, )\d+(?=[,)])", call[3]) if call[2] else ()
            found.append(Launch(call[1], tuple(map(int, numbers))))
    return found
