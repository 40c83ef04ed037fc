"""unswitch: all sites share one predicate, so decide once a step: a slow graph and a fast graph without conds.

A `cond` in Inductor is a host branch that splits the CUDA graph, per site; one decision outside costs one scalar.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module
from sfi_compile.passes.base import Pass, VerificationError, Work
from sfi_compile.passes.dataflow import DataFlow, remove_dead

_COND = torch.ops.higher_order.cond
_SHARED = frozenset({torch.ops.sfi.frame.default})
"""What sites have in common: computed once a step."""


@dataclasses.dataclass(frozen=True)
class Unswitch(Pass):
    """Leaves the guarded graph as it is and adds the two graphs."""

    name: ClassVar[str] = "unswitch"

    def apply(self, work: Work) -> Work:
        """`work.slow` and `work.fast`, with the guarded graph's inputs in its order."""
        conds = [n for n in work.graph.graph.nodes if n.target is _COND]
        if not conds:
            raise VerificationError("nothing to unswitch: the graph has no guarded site")
        predicates = {n.args[0] for n in conds}
        if len(predicates) != 1:
            raise VerificationError(f"the sites do not share one predicate: {sorted(map(str, predicates))}")
        predicate = conds[0].args[0]
        if not isinstance(predicate, fx.Node) or not DataFlow(work.graph.graph).decides(predicate, conds):
            raise VerificationError(f"the predicate {predicate} cannot be evaluated before every site")
        return dataclasses.replace(work, slow=_taken(work.graph, 1), fast=_taken(work.graph, 2))


def _taken(guarded: fx.GraphModule, branch_argument: int) -> fx.GraphModule:
    """The graph in which every cond takes the branch at `branch_argument`."""
    module = copy_graph_module(guarded)
    graph = module.graph
    shared: dict[Any, fx.Node] = {}
    flow = DataFlow(graph)
    for cond in [n for n in graph.nodes if n.target is _COND]:
        branch = getattr(module, str(cond.args[branch_argument].target))
        operands = dict(zip((n for n in branch.graph.nodes if n.op == "placeholder"), cond.args[3], strict=True))
        with graph.inserting_before(cond):
            outputs = _inline(
                graph, branch.graph, operands, shared, functools.partial(flow.reaching_writes, reader=cond)
            )
        for user in list(cond.users):
            if user.target is not operator.getitem:
                raise VerificationError(f"{user.name} uses a cond as a whole")
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(cond)
    remove_dead(graph)
    module.delete_all_unused_submodules()
    graph.lint()
    module.recompile()
    return module


def _inline(
    graph: fx.Graph,
    branch: fx.Graph,
    mapping: dict[fx.Node, fx.Node],
    shared: dict[Any, fx.Node],
    writes: Callable[[fx.Node], tuple[fx.Node, ...]],
) -> tuple[fx.Node, ...]:
    """Copy the nodes of `branch` into `graph` at its insertion point; the nodes of its outputs.

    What another branch has computed from the same nodes is not computed again, for the operators in `_SHARED`; nodes
    are the same only if, by what `writes` says, nothing more has been written into them.
    """
    for node in branch.nodes:
        if node.op == "output":
            return tuple(mapping[n] for n in node.args[0])
        if node.op == "placeholder":
            continue
        key: Any = node
        if node.target in _SHARED:
            given = fx.map_arg(node.args, mapping.__getitem__)
            key = (node.target, given, *(writes(n) for n in given if isinstance(n, fx.Node)))
        if key not in shared:
            shared[key] = graph.node_copy(node, mapping.__getitem__)
        mapping[node] = shared[key]
    raise VerificationError("a branch without output")
