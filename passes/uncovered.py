"""Caches that nobody speaks for: written at the step's positions, and read by nothing that is known to be attention.

Whoever brings a decoder is told why a layer stays dense. Attention that hides in an operator of its own, or is written
in a way that `canonicalise` does not see at all, leaves this trace: a cache, and no site or rejection beside it.
Analysis only, for `match`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example, module_path
from sfi_compile.passes.base import MOST_QUERIES, Refusal
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import name_of
from sfi_compile.passes.writes import position_and_value
from sfi_compile.site import Rejection, Site

_COPIES = ("index_copy", "index_put", "scatter", "slice_scatter", "select_scatter")


def uncovered(graph: fx.Graph, flow: DataFlow, sites: Iterable[Site], known: Iterable[Rejection]) -> list[Rejection]:
    """A rejection for every module that reads such a cache."""
    covered = {write.root for site in sites for write in site.writes}
    places = {rejection.where for rejection in known}
    found: dict[str, Rejection] = {}
    for root in graph.nodes:
        if root.op != "placeholder" or root in covered or not _is_cache(root, flow):
            continue
        readers = _readers(root, flow)
        modules = {module_path(n) for n in readers}
        nameless = modules <= {n.name for n in readers}
        if not readers or not modules.isdisjoint(places) or (places and nameless):
            continue  # nobody reads it, or somebody speaks for it
        where = "graph" if nameless else module_path(readers[0])
        explanation = f"{root.name} is written at the step's positions and read by {name_of(readers[0])}, "
        explanation += "which leads to no attention that is known"
        found.setdefault(where, Rejection("unknown-attention", where, explanation, "use scaled_dot_product_attention"))
    return list(found.values())


def _is_cache(root: fx.Node, flow: DataFlow) -> bool:
    """Whether a step writes a few positions, which move from step to step, along an axis of an input, or returns a copy
    with these positions replaced."""
    value = example(root)
    if not isinstance(value, torch.Tensor) or value.dim() < 3 or isinstance(value, torch.nn.Parameter):
        return False
    return bool(_copies(root)) or any(_moves(write) for write in flow.writes(root))


def _copies(root: fx.Node) -> list[fx.Node]:
    return [n for n in root.users if name_of(n) in _COPIES and any(user.op == "output" for user in n.users)]


def _moves(write: fx.Node) -> bool:
    """Whether a write is one of a few positions, which are no numbers of the graph."""
    into: Any = write.args[0]
    for axis in range(example(into).dim()):
        try:
            first, count, _, _ = position_and_value(write, into, axis, "")
        except Refusal:
            continue
        if isinstance(first, fx.Node) and count <= MOST_QUERIES:
            return True
    return False


def _readers(root: fx.Node, flow: DataFlow) -> list[fx.Node]:
    """What computes something from a cache, past its views, in program order."""
    own = {root, *_copies(root)}

    def reads(node: fx.Node) -> bool:
        apart = flow.origin(node) not in own and node.op != "output"
        return apart and any(flow.origin(n) in own for n in node.all_input_nodes)

    return [n for n in flow.nodes if reads(n)]
