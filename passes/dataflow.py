"""The FX graph as a digraph with data *and* mutation edges.

Dynamo graphs mutate caches in place and then read the input again, not the result of the write, so def-use edges alone
are wrong: a walk to a cache root, and a slice of what a value depends on, must follow the writes as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch import fx

from sfi_compile.compat.dynamo import example, storage_of

_INPLACE_OPERATORS = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ior, operator.iand, operator.setitem}
)

_OPERATOR_KEYWORDS = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})
"""Named after keywords, hence the trailing underscore: not in place."""


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose values `node` changes in place.

    In-place methods end in one underscore; operators know their schema; the rest is a short list.
    """
    if node.op not in ("call_method", "call_function"):
        return ()
    target: Any = node.target
    written: list[Any] = []
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]
    if isinstance(target, torch._ops.OpOverload):
        for i, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name))
    elif node.kwargs.get("out") is not None:
        written.append(node.kwargs["out"])
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        by_name = name.endswith("_") and not name.endswith("__") and target not in _OPERATOR_KEYWORDS
        if target in _INPLACE_OPERATORS or by_name or node.kwargs.get("inplace") is True:
            written.extend(node.args[:1])
    nodes: list[fx.Node] = []
    fx.map_arg(written, nodes.append)
    return tuple(nodes)


def mutated_argument(node: fx.Node) -> fx.Node | None:
    """The first of `mutated_arguments`, whose value is usually also the node's, or None."""
    return next(iter(mutated_arguments(node)), None)


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What outputs need, and writes into inputs; writes into the graph's own tensors if they are read.

    Also calls without a value, which can only be there for what they do: `vmap` enters and leaves by such calls.
    """
    flow = DataFlow(graph)
    live: set[fx.Node] = set()
    read: set[fx.Node] = set()
    for node in reversed(flow.nodes):
        written = {flow.origin(n) for n in mutated_arguments(node)}
        inputs = any(n.op in ("placeholder", "get_attr") for n in written)
        needed = node.op in ("placeholder", "output") or not live.isdisjoint(node.users)
        acts = not written and (node.is_impure() or (node.op == "call_function" and "example_value" not in node.meta))
        if needed or inputs or written & read or acts:
            live.add(node)
            read.update(flow.origin(n) for n in node.all_input_nodes)
    return live


def remove_dead(graph: fx.Graph) -> None:
    """Remove what is not live."""
    live = live_nodes(graph)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


class DataFlow:
    """Data and mutation edges of one graph. A snapshot: build a new one after changing the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self._origin: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, list[fx.Node]] = {}
        first: dict[int, fx.Node] = {}
        for node in self.nodes:
            written = mutated_arguments(node)
            # Fake values share storage as the real ones will, whatever made a view, and if two inputs overlap. Only
            # what a write returns may have no value of its own.
            storage = storage_of(node)
            origin = self._origin[written[0]] if written else node
            self._origin[node] = origin if storage is None else first.setdefault(storage, origin)
            for origin in dict.fromkeys(self._origin[w] for w in written):
                self._writes.setdefault(origin, []).append(node)

    @cached_property
    def digraph(self) -> nx.MultiDiGraph:
        """Edges producer → user (`kind="data"`) and write → later reader of the same storage (`kind="mutation"`)."""
        graph = nx.MultiDiGraph()
        graph.add_nodes_from(self.nodes)
        for node in self.nodes:
            for source in node.all_input_nodes:
                graph.add_edge(source, node, kind="data")
                for write in self.reaching_writes(source, node):
                    graph.add_edge(write, node, kind="mutation")
        return graph

    def origin(self, node: fx.Node) -> fx.Node:
        """The first node with the storage of `node`: itself, or what it is a view of."""
        return self._origin[node]

    def writes(self, root: fx.Node) -> tuple[fx.Node, ...]:
        """In-place writes to the storage of `root`, in program order."""
        return tuple(self._writes.get(self.origin(root), ()))

    def is_pure_copy(self, node: fx.Node) -> bool:
        """Whether a view or copy still holds, wherever it is read, what it was made from."""
        source = node.args[0] if node.args else None
        if node not in self._origin or not isinstance(source, fx.Node) or source not in self._origin:
            return True  # added since the snapshot, and written by nobody
        if self._origin[node] is self._origin[source]:
            return True
        return not self.writes(node) and not any(self.order[w] > self.order[node] for w in self.writes(source))

    def reaching_writes(self, value: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
        """Writes to `value`'s storage that come before `reader`."""
        at = self.order[reader]
        return tuple(w for w in self.writes(value) if self.order[w] < at and w is not reader)

    def slice_of(self, node: fx.Node) -> list[fx.Node]:
        """Everything `node` depends on, itself included, through data and mutation, in program order."""
        return sorted(nx.ancestors(self.digraph, node) | {node}, key=self.order.__getitem__)

    def decides(self, predicate: fx.Node, sites: list[fx.Node]) -> bool:
        """Whether `predicate` can be evaluated once, before all `sites`: it comes first, and nothing that it depends on
        (through data or mutation) is a site or depends on one. This is dominance in a graph without branches.
        """
        if any(self.order[site] < self.order[predicate] for site in sites):
            return False
        return not (nx.ancestors(self.digraph, predicate) & set(sites))


def alike(flow: DataFlow, nodes: Sequence[fx.Node]) -> list[list[tuple[fx.Node, fx.Node]]]:
    """Groups of (node, input), in which equal inputs mean equal nodes: each is the same function of one input.

    A node that depends on several inputs, or on a write, or on nothing that it could share is a group of its own.
    """
    groups: dict[Any, list[tuple[fx.Node, fx.Node]]] = {}
    for node in nodes:
        needed = flow.slice_of(node)
        inputs = [n for n in needed if n.op == "placeholder"]
        names = {n: f"%{i}" for i, n in enumerate(needed)}
        key: Any = node
        value = example(inputs[0]) if len(inputs) == 1 else None
        if isinstance(value, torch.Tensor) and not any(mutated_arguments(n) for n in needed):
            steps = [repr((n.target, fx.map_arg((n.args, n.kwargs), names.get))) for n in needed if n is not inputs[0]]
            key = (names[inputs[0]], *steps, tuple(value.shape), value.dtype, value.device)
        groups.setdefault(key, []).append((node, inputs[0] if inputs else node))
    return list(groups.values())


def extract(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A module that computes `nodes` alone (a tuple), and the placeholders that it takes, in order.

    Inputs that the slice writes into are copied first: computing the value early must not do the graph's work twice.
    """
    flow = DataFlow(module.graph)
    needed = sorted({n for node in nodes for n in flow.slice_of(node)}, key=flow.order.__getitem__)
    inputs = [n for n in needed if n.op == "placeholder"]
    changed = {flow.origin(written) for n in needed for written in mutated_arguments(n)}
    graph = fx.Graph()
    mapping = {n: graph.placeholder(n.name) for n in inputs}
    for n in inputs:
        if n in changed:
            mapping[n] = graph.call_method("clone", (mapping[n],))
    for n in needed:
        if n.op != "placeholder":
            mapping[n] = graph.node_copy(n, mapping.__getitem__)
    graph.output(tuple(mapping[n] for n in nodes))
    return fx.GraphModule(module, graph), inputs
