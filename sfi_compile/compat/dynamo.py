"""What Dynamo hangs on its graphs without saying so. Checked on torch 2.11.0, 2.13.0 and 2.14.1.

A copy made by `copy.deepcopy` loses the sources of parameters and inputs; without them no input counts as static, and
CUDA graphs are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

_STATIC = {"_dynamo_static_input_type": "unguarded"}


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled since its last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_last_recompilation() -> bool:
    """Whether Dynamo, now compiling a function, will give up on it when it has to do so once more."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    count = None if compile_id is None else compile_id.frame_compile_id
    return count is not None and count + 1 >= torch._dynamo.config.recompile_limit


def example(node: fx.Node) -> Any:
    """The fake value that Dynamo (or a pass) recorded for a node; None where there is none."""
    return node.meta.get("example_value", node.meta.get("val"))


def storage_of(node: fx.Node) -> int | None:
    """Equal for two nodes whose values share memory; None where the node's fake value does not tell."""
    value = example(node)
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None


def size_hint(size: int | torch.SymInt) -> int:
    """The value that a size has in this call; unlike `int(size)`, asking adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def has_symbols(graph: fx.Graph) -> bool:
    """Whether any number or size of a graph may be another one in another call."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    values = [example(node) for node in graph.nodes]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return any(isinstance(value, symbolic) for value in (*values, *sizes))


def distance(start: Any, stop: Any) -> int | None:
    """`stop - start` of two whole numbers, or nodes of such, if it is the same in every call; else None."""
    values = [example(n) if isinstance(n, fx.Node) else n for n in (start, stop)]
    if not all(isinstance(v, (int, torch.SymInt)) for v in values):
        return None
    first, last = (v.node.expr if isinstance(v, torch.SymInt) else v for v in values)
    between = last - first
    return int(between) if isinstance(between, int) or between.is_number else None


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode in which a Dynamo graph was traced."""
    for node in graph.nodes:
        value = example(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def new_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule that generates its Python code when it is first run or printed, not at every change."""
    return _LazyGraphModule(root, graph)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with its own copy of the graph, that still knows the sources of its inputs."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = new.graph_copy(gm.graph, mapping)
    if not any(n.op == "output" for n in new.nodes):
        new.output(result)
    for old, copied in mapping.items():
        copied.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            copied._dynamo_source = old._dynamo_source
    module = new_graph_module(gm, new)
    for name in ("_param_name_to_source", "compile_subgraph_reason", "meta"):
        if hasattr(gm, name):
            setattr(module, name, getattr(gm, name))
    return module


def add_static_input(graph: fx.Graph, name: str, tensor: torch.Tensor, mode: FakeTensorMode) -> fx.Node:
    """Add a placeholder after the last one, for a tensor whose address never changes. Returns its node."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    # static_shapes: otherwise the shape environment gets symbols that have no source, and guard building fails.
    node.meta["example_value"] = mode.from_tensor(tensor, static_shapes=True)
    node.meta["tensor_dict"] = dict(_STATIC)
    node._dynamo_source = None
    return node


def module_path(node: fx.Node) -> str:
    """Path of the module that a node was traced in ("model.layers.0.self_attn"), or its own name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    for noise in ("L['self'].", "L['args'][0].", "L['self']", "L['args'][0]"):
        path = path.replace(noise, "")
    return path.replace("_modules['", "").replace("']", "") or node.name


def needs_gradients(inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs must be differentiable."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)


class _Stop(Exception):
    """Ends a compilation before anything runs."""


def trace_once(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], see: Callable[[fx.GraphModule], None]
) -> str | None:
    """Let Dynamo trace a call, show the graph to `see`, and stop before it is compiled or executed.

    If `function` is compiled already, its original is traced.

    Returns:
        None, or the first line of the reason why Dynamo cannot trace the call as one graph.
    """
    from torch._dynamo.exc import Unsupported

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        see(gm)
        raise _Stop

    function = getattr(function, "_torchdynamo_orig_callable", function)
    try:
        # Not fullgraph=True: it also lets `Tensor.item()` into the graph, which otherwise breaks it.
        with torch._dynamo.error_on_graph_break(True):
            torch.compile(function, backend=backend)(*args, **kwargs)
    except BackendCompilerFailed as failure:
        if not isinstance(failure.inner_exception, _Stop):
            raise failure.inner_exception from None
        return None
    except Unsupported as reason:
        return str(reason).strip().splitlines()[0]
    return "the call has nothing to compile"
