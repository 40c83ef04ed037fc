"""specialise: pin a decode graph to its batch size and cache length.

State is allocated once per decode graph, so its shapes are numbers. Dynamo may hand over symbolic sizes when it has
seen two batch sizes or two caches; reading their values adds guards, so that other sizes get a graph of their own.
Numbers that are no sizes stay symbolic: a sliding layer counts its tokens in one, and pinning it would mean a new graph
at every step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module, example, size_hint
from sfi_compile.passes.base import Pass, Work

_SYMBOLIC = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclasses.dataclass(frozen=True)
class Specialise(Pass):
    """Replaces every symbolic number that sizes depend on by its value, in a private copy; inputs keep their places."""

    name: ClassVar[str] = "specialise"
    pin: bool = True
    """False: values as they are now, without a guard. For looking only: code compiled from it would go wrong."""

    def apply(self, work: Work) -> Work:
        """The graph without symbolic sizes."""
        module = copy_graph_module(work.graph)
        tensors = [t for t in map(example, module.graph.nodes) if isinstance(t, torch.Tensor)]
        lengths: list[Any] = [n for t in tensors for n in t.shape]
        symbolic = [n for n in lengths if isinstance(n, torch.SymInt)]
        sizes = {symbol for n in symbolic for symbol in n.node.expr.free_symbols}
        for n in symbolic if self.pin else ():
            int(n)
        numbers: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            kind = _SYMBOLIC.get(type(example(node)))
            if kind is not None and example(node).node.expr.free_symbols <= sizes:
                numbers[node] = kind(example(node) if self.pin else size_hint(example(node)))
            elif node.op not in ("placeholder", "get_attr"):
                node.args = fx.map_arg(node.args, lambda n: numbers.get(n, n))
                node.kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, n))
        for node in reversed([n for n in numbers if n.op != "placeholder"]):
            if not node.users:
                module.graph.erase_node(node)
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module)
