"""lower: `sfi::` operators → what the device runs.

On every device the fast path's operators become plain aten, traced from their bodies in `sfi_compile.ops`, so that
Inductor compiles and fuses them with the model. The slow path's stay operators: they work row by row on the rows that
are slow, which a graph of static shapes cannot say.
"""

from __future__ import annotations

import dataclasses
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
        for module in work.variants:
            for node in [n for n in module.graph.nodes if n.target in _PLAIN]:
                _expand(module.graph, node)
            module.graph.lint()
            module.recompile()
        return work


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an operator by its traced plain body."""
    body = _PLAIN[node.target]
    if node.kwargs:
        raise VerificationError(f"{node.format_node()}: sfi operators take positional arguments only")
    given = {i: a for i, a in enumerate(node.args) if isinstance(a, fx.Node)}
    tensors = list(given.values())

    def call(*values: torch.Tensor) -> Any:
        full: list[Any] = list(node.args)
        for i, value in zip(given, values, strict=True):
            full[i] = value
        if body is ops.plain["gather"] and len(full) == 4:
            full.append(None)
        return body(*full)

    mode = fake_mode_of(graph)
    if mode is None:
        raise VerificationError("a graph without fake values cannot be lowered")
    with mode, torch.no_grad():
        traced = make_fx(call)(*(example(t) for t in tensors))
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(inputs, tensors, strict=True))
    result: Any = None
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                result = inner.args[0]
            elif inner.op != "placeholder":
                mapping[inner] = graph.node_copy(inner, mapping.__getitem__)
                mapping[inner].meta["example_value"] = inner.meta.get("val")
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(mapping[result])
    graph.erase_node(node)
