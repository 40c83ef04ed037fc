"""verify: the graphs are legal, and the fast graph does no work on a context-sized axis.

The second claim is what makes a fast step cost the same at 8K and at 128K by construction. It is checked by following
context-sized axes forward: they enter through cache roots, through inputs as long as the context, and through
constructors (`arange(N)`); they end at `sfi::` operators, whose results have the size of their index or of the memory.
Allowed are the cache roots themselves, the in-place writes into them, and views of either.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.base import ContextSizedError, Pass, VerificationError, Work
from sfi_compile.passes.dataflow import DataFlow, mutated_argument, mutated_arguments

_COND = torch.ops.higher_order.cond
_ENDS = frozenset({torch.ops.sfi.gather.default, torch.ops.sfi.memory_attention.default, torch.ops.sfi.append.default})
_LOOKUPS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default})
"""Read as many elements as their index has, whatever the size of the table."""


@dataclasses.dataclass(frozen=True)
class Verify(Pass):
    """Raises `VerificationError`; changes nothing."""

    name: ClassVar[str] = "verify"

    def apply(self, work: Work) -> Work:
        """The same work."""
        slow, fast = work.variants
        for label, module in (("slow", slow), ("fast", fast)):
            module.graph.lint()
            if any(n.target is _COND for n in module.graph.nodes):
                raise VerificationError(f"the {label} graph still holds a cond")
            same_writes(work.graph.graph, module.graph, label)
        sources: dict[int, set[str]] = {}
        for site in work.matched.sites:
            sources.setdefault(site.context, set()).update(n.name for n in site.context_sources)
        for size, names in sources.items():
            kept = {n.name for site in work.matched.sites for n in site.kept}
            found = [n for n in context_sized(fast.graph, size, names) if n.name not in kept]
            if found:
                lines = "; ".join(f"{n.name} = {n.format_node()}" for n in found[:3])
                raise ContextSizedError(f"the fast graph works on the whole context ({size}): {lines}")
        return work


def same_writes(guarded: fx.Graph, graph: fx.Graph, label: str) -> None:
    """Every write of the guarded graph into an input must have survived: a lost one is a lost token of the cache."""
    alive, flow = {n.name for n in graph.nodes}, DataFlow(guarded)
    kept = [n for n in guarded.nodes if any(flow.origin(w).op == "placeholder" for w in mutated_arguments(n))]
    lost = [n.name for n in kept if n.name not in alive]
    if lost:
        raise VerificationError(f"the {label} graph lost the writes {', '.join(lost)}")


def context_sized(graph: fx.Graph, size: int, sources: set[str]) -> list[fx.Node]:
    """Nodes that compute something with an axis of the context's `size`; roots, writes to them, and views aside.

    `sources` names the nodes where that axis enters. An equal size elsewhere (a hidden size, say) is not the context.
    What the model needs without the memory is not counted: attention that was left dense, say, or a mask that it
    returns.
    """
    flow = DataFlow(graph)
    own = _of_the_model(graph)
    tainted: set[fx.Node] = set()
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or node.target in _ENDS:
            continue
        if not _has_axis(example(node), size):
            # A view, a write, or a lookup of a few positions is small work; a sum over the axis is not.
            if flow.origin(node) is node and node.target not in _LOOKUPS and tainted & set(node.all_input_nodes):
                found.append(node)
            continue
        is_input = node.op in ("placeholder", "get_attr")
        if node.name in sources:
            tainted.add(node)
            if not is_input and flow.origin(node).op not in ("placeholder", "get_attr"):
                found.append(node)
        elif flow.origin(node) is not node and flow.origin(node) in tainted:
            tainted.add(node)  # a view, or a write in place
            if flow.origin(node).op not in ("placeholder", "get_attr"):
                found.append(node)
        elif not is_input and node.target not in _LOOKUPS and tainted & set(node.all_input_nodes):
            tainted.add(node)
            found.append(node)
    return [n for n in found if n not in own]


def _of_the_model(graph: fx.Graph) -> set[fx.Node]:
    """What outputs and writes need, other than through the memory's operators; but the queries are the model's."""
    needed: set[fx.Node] = set()
    queries: set[Any] = set()
    for node in reversed(list(graph.nodes)):
        lives = node.op == "output" or mutated_argument(node) is not None or not needed.isdisjoint(node.users)
        if getattr(node.target, "namespace", None) == "sfi":
            if node.target is torch.ops.sfi.memory_attention.default:
                queries.add(node.args[0])
        elif lives or node in queries:
            needed.add(node)
    return needed


def _has_axis(value: Any, size: int) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_axis(item, size) for item in value)
    return isinstance(value, torch.Tensor) and any(int(n) == size for n in value.shape)
