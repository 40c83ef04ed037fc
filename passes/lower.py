"""lower: `sfi::` operators → what the device runs.

On every device the fast path's operators become plain aten, traced from their bodies in `sfi_compile.ops`, so that
Inductor compiles and fuses them with the model. The slow path's stay operators: they work row by row on the rows that
are slow, which a graph of static shapes cannot say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from sfi_compile import ops
from sfi_compile.compat.dynamo import example, fake_mode_of
from sfi_compile.passes.base import Pass, VerificationError, Work

_PLAIN: dict[Any, Any] = {getattr(torch.ops.sfi, name).default: body for name, body in ops.plain.items()}


@dataclasses.dataclass(frozen=True)
class Lower(Pass):
    """Changes the slow and the fast graph in place: they are this pipeline's own, and nothing reads them before."""

    name: ClassVar[str] = "lower"

    def apply(self, work: Work) -> Work:
        """The work with both graphs lowered."""
        traces: dict[Hashable, fx.Graph] = {}
        for module in work.variants:
            for node in [n for n in module.graph.nodes if n.target in _PLAIN]:
                # Sites of one model mostly look alike: each kind is traced once.
                kind = _kind(node)
                if kind not in traces:
                    traces[kind] = _trace(module.graph, node)
                _expand(module.graph, node, traces[kind])
            module.graph.lint()
            module.recompile()
        return work


def _kind(node: fx.Node) -> Hashable:
    """What the trace of an operator depends on: its target, and every argument's value or tensor metadata."""
    return node.target, tuple(_description(a) if isinstance(a, fx.Node) else repr(a) for a in node.args)


def _description(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    value = example(node)
    return tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device


def _trace(graph: fx.Graph, node: fx.Node) -> fx.Graph:
    """The aten graph of an operator's plain body, for its arguments' fake values."""
    body = _PLAIN[node.target]
    mode = fake_mode_of(graph)
    if mode is None or node.kwargs:
        raise VerificationError(f"{node.format_node()}: needs fake values and positional arguments only")
    given = {i: a for i, a in enumerate(node.args) if isinstance(a, fx.Node)}

    def call(*values: torch.Tensor) -> Any:
        full: list[Any] = list(node.args)
        for i, value in zip(given, values, strict=True):
            full[i] = value
        return body(*full)

    with mode, torch.no_grad():
        # Fresh values: the tracer takes equal objects for one input, and another node's arguments may differ.
        values = []
        for argument in given.values():
            shape, stride, dtype, device = _description(argument)
            values.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        return make_fx(call)(*values).graph


def _expand(graph: fx.Graph, node: fx.Node, trace: fx.Graph) -> None:
    """Replace an operator by its traced plain body."""
    tensors = [a for a in node.args if isinstance(a, fx.Node)]
    inputs = [n for n in trace.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(inputs, tensors, strict=True))
    result: Any = None
    with graph.inserting_before(node):
        for inner in trace.nodes:
            if inner.op == "output":
                result = inner.args[0]
            elif inner.op != "placeholder":
                mapping[inner] = graph.node_copy(inner, mapping.__getitem__)
                mapping[inner].meta["example_value"] = inner.meta.get("val")
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(mapping[result])
    graph.erase_node(node)
