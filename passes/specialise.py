"""specialise: pin a decode graph to its batch size and cache length.

State is allocated once per decode graph, so its shapes are numbers. Dynamo may hand over symbolic sizes when it has
seen two batch sizes or two caches; reading their values adds guards, so that other sizes get a graph of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module, example
from sfi_compile.passes.base import Pass, Work

_SYMBOLIC = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclasses.dataclass(frozen=True)
class Specialise(Pass):
    """Replaces every symbolic number by its value, in a private copy; inputs keep their places."""

    name: ClassVar[str] = "specialise"

    def apply(self, work: Work) -> Work:
        """The graph without symbolic numbers."""
        module = copy_graph_module(work.graph)
        numbers: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            kind = _SYMBOLIC.get(type(example(node)))
            if kind is not None:
                numbers[node] = kind(example(node))
            elif node.op not in ("placeholder", "get_attr"):
                node.args = fx.map_arg(node.args, lambda n: numbers.get(n, n))
                node.kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, n))
        for node in reversed([n for n in numbers if n.op != "placeholder"]):
            if not node.users:
                module.graph.erase_node(node)
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module)
