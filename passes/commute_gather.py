"""commute_gather: push the gathers of every fast branch up through sequence-pointwise ops to the graph's inputs.

op(x) at some positions = op(x at those positions), for every op that is pointwise along the sequence axis, so the fast
branch can compute the mask at the memory's positions, and keys and values at the step's own, without the rest; the
context-sized values above them die. What this step writes into a cache is, at the step's own positions, what the cache
holds there: the fast branch does not read the cache at all. The slow branch computes the mask of its attention over the
memory, for rows that are not slow, in the same way: a look-up in the context's mask would be a launch of its own.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module, example
from sfi_compile.passes import along, axes
from sfi_compile.passes.base import Builder, Pass, VerificationError, Work, transfer
from sfi_compile.passes.dataflow import DataFlow, remove_dead
from sfi_compile.passes.shapes import name_of, shape_of
from sfi_compile.site import CacheWrite

_COND = torch.ops.higher_order.cond
_GATHER = torch.ops.sfi.gather.default
_TAKE = torch.ops.aten.index_select.default
_ATTEND = torch.ops.sfi.memory_attention.default


@dataclasses.dataclass(frozen=True)
class CommuteGather(Pass):
    """Rewrites the branches of a private copy; a gather that already reads an input stays as it is."""

    name: ClassVar[str] = "commute_gather"

    def apply(self, work: Work) -> Work:
        """The guarded graph whose fast branches read inputs, written values, and values without a sequence axis; and so
        do the slow branches' masks at the memory's positions."""
        module = copy_graph_module(work.graph)
        match = transfer(work.matched, work.graph.graph, module.graph)
        writes = {write.root: write for site in match.sites for write in site.writes}
        flow = DataFlow(module.graph)
        for cond in [n for n in module.graph.nodes if n.target is _COND]:
            Commuter(module, cond, writes, flow).commute()
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module, match=match)


class Commuter:
    """The two branches of one cond, edited together: both always take the same operands."""

    def __init__(
        self, module: fx.GraphModule, cond: fx.Node, writes: dict[fx.Node, CacheWrite], flow: DataFlow
    ) -> None:
        self.module, self.cond, self.writes, self.flow = module, cond, writes, flow
        arguments: tuple[Any, ...] = cond.args
        self.operands: list[fx.Node] = list(arguments[3])
        self.modules: dict[str, fx.GraphModule] = {}
        for branch in arguments[1:3]:
            self.modules[branch.target] = copy_graph_module(getattr(module, branch.target))
            setattr(module, branch.target, self.modules[branch.target])
        slow, fast = (m.graph for m in self.modules.values())
        self.inputs: dict[fx.Graph, list[fx.Node]] = {
            graph: [n for n in graph.nodes if n.op == "placeholder"] for graph in (slow, fast)
        }
        self.slow, self.fast = slow, fast
        self.graph, self.builder = fast, Builder(fast)
        """The branch that is being edited."""
        self.taken: dict[tuple[fx.Node, int], fx.Node] = {}

    def commute(self) -> None:
        """Push every gather of the fast branch as far up as it goes, and the slow branch's for its memory."""
        self._edit([n for n in self.fast.nodes if n.target in (_GATHER, _TAKE)])
        self.graph, self.builder = self.slow, Builder(self.slow)
        self._edit([n for n in self.slow.nodes if n.target is _GATHER and any(u.target is _ATTEND for u in n.users)])
        self.cond.args = (*self.cond.args[:3], tuple(self.operands))
        for branch in self.modules.values():
            branch.graph.lint()
            branch.recompile()

    def _edit(self, gathers: list[fx.Node]) -> None:
        for node in gathers:
            arguments: tuple[Any, ...] = node.args
            parent = self.operands[self.inputs[self.graph].index(arguments[0])]
            with self.graph.inserting_before(node):
                if node.target is _TAKE:
                    node.replace_all_uses_with(self._taken(parent, *arguments[1:]))
                else:
                    node.replace_all_uses_with(self._pushed(parent, arguments[2], arguments[1]))
            self.graph.erase_node(node)
        remove_dead(self.graph)

    def _operand(self, parent: fx.Node) -> fx.Node:
        """The branch's input for a node of the parent graph; added to both branches if it is new."""
        if parent in self.operands:
            return self.inputs[self.graph][self.operands.index(parent)]
        if parent.graph is not self.module.graph:
            raise VerificationError(f"{parent.name} is not a node of the guarded graph")
        self.operands.append(parent)
        for graph, inputs in self.inputs.items():
            with graph.inserting_after(inputs[-1]):
                added: fx.Node = graph.placeholder(f"from_{parent.name}")
            added.meta["example_value"] = example(parent)
            inputs.append(added)
        return self.inputs[self.graph][-1]

    # The mask, at other positions for every row and head

    def _pushed(self, node: fx.Node, layout: str, index: fx.Node) -> fx.Node:
        """The mask at `index` [B, H, n], with four axes, computed from values one or more levels up."""
        if not layout:
            return self._operand(node)  # without axes, it has no say in the result's dtype: keep it so
        if "s" not in layout:
            return self._four(self._operand(node), layout, index)
        found = axes.step(node, layout, self._sizes(index)[1])
        if isinstance(found, axes.View):
            return self._pushed(found.source, found.layout, index)
        if isinstance(found, axes.Leaf):
            rows = None if found.rows is None else self._operand(found.rows)
            return self.builder.call(_GATHER, self._operand(found.source), index, found.layout, rows)
        if isinstance(found, axes.Kept):
            return self.builder.call(_GATHER, self._operand(node), index, found.layout, None)
        if isinstance(found, axes.Arange):
            return self._positions(found, example(node).dtype, index)
        if isinstance(found, axes.Fill):
            value = example(node)
            return self.builder.call(torch.full, (1, 1, 1, 1), found.value, dtype=value.dtype, device=value.device)
        if isinstance(found, axes.Pointwise):
            done = {n: self._pushed(n, names, index) for n, names in found.layouts.items()}
            return self._same(node, done)
        if isinstance(found, axes.Table):
            lookup = [self._whole(i, found, index) if isinstance(i, str) else self._pushed(i, found.layouts[i], index)
                      for i in found.indices]  # fmt: skip
            value_node = self.builder.call(torch.ops.aten.index.Tensor, self._operand(found.source), lookup)
            for function in found.functions:
                value_node = self._same(function, {function.all_input_nodes[0]: value_node})
            return value_node
        raise VerificationError(f"matched site cannot be commuted: {found.reason}")

    def _same(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> fx.Node:
        """The op of `node` on other operands."""
        args = fx.map_arg(node.args, operands.__getitem__)
        kwargs = fx.map_arg(node.kwargs, operands.__getitem__)
        target: Any = node.target
        add = self.builder.method if node.op == "call_method" else self.builder.call
        return add(target, *args, **kwargs)

    def _positions(self, arange: axes.Arange, dtype: torch.dtype, index: fx.Node) -> fx.Node:
        # Of the memory's slots the empty ones hold -1: they count as position 0, as in `sfi::gather`.
        value = self._four(self.builder.call(torch.clamp, index, 0), "bhs", index)
        return self._counted(value, arange.start, arange.step, dtype)

    def _counted(self, position: fx.Node, start: int, step: int, dtype: torch.dtype) -> fx.Node:
        if step != 1:
            position = self.builder.call(torch.mul, position, step)
        if start:
            position = self.builder.call(torch.add, position, start)
        return position if example(position).dtype == dtype else self.builder.method("to", position, dtype)

    def _whole(self, letter: str, table: axes.Table, index: fx.Node) -> fx.Node:
        """All entries of an axis of a table, which is the axis `letter` of the mask."""
        value = example(table.source)
        count = self.builder.call(torch.arange, int(value.shape[-1]), device=value.device)
        return self._four(count, letter, index)

    @staticmethod
    def _sizes(index: fx.Node) -> tuple[int, int]:
        return int(example(index).shape[0]), int(example(index).shape[1])

    def _four(self, node: fx.Node, layout: str, index: fx.Node) -> fx.Node:
        """Axes in the order batch, heads, queries, sequence, of size one where `layout` lacks them."""
        shape = tuple(int(n) for n in example(node).shape)
        sizes: dict[str, int] = {}
        for name, size in zip(layout, shape, strict=True):
            sizes |= dict(zip("bh", self._sizes(index), strict=True)) if name == "m" else {name: size}
        sizes.pop("1", None)
        order = layout.replace("m", "bh").replace("1", "")
        wanted = "".join(sorted(order, key="bhqs".index))
        if order != wanted:
            node = self.builder.call(torch.reshape, node, tuple(sizes[n] for n in order))
            node = self.builder.call(torch.permute, node, tuple(order.index(n) for n in wanted))
        full = tuple(sizes.get(name, 1) for name in "bhqs")
        return node if tuple(example(node).shape) == full else self.builder.call(torch.reshape, node, full)

    # Keys and values, at the step's own positions

    def _taken(self, node: fx.Node, axis: int, position: fx.Node) -> fx.Node:
        """`node` at the positions along `axis`, computed from values one or more levels up."""
        if (node, axis) not in self.taken:
            self.taken[node, axis] = self._computed(node, axis, position)
        return self.taken[node, axis]

    def _computed(self, node: fx.Node, axis: int, position: fx.Node) -> fx.Node:
        found = along.step(node, axis, self.flow)
        if isinstance(found, along.Same):
            return self._taken(found.source, axis, position)
        if isinstance(found, along.Leaf):
            write = self.writes.get(found.source)
            if write is not None:
                return self._written(write)
            return self.builder.call(_TAKE, self._operand(found.source), axis, position)
        if isinstance(found, along.Count):
            return self._counted(position, found.start, found.step, example(node).dtype)
        if isinstance(found, along.Assembled):
            return self._assembled(node, axis, found, position)
        if isinstance(found, along.Apply):
            done = {n: self._taken(n, place, position) for n, place in found.axes.items()}
            return self._applied(node, axis, done, position)
        raise VerificationError(f"matched site cannot be commuted: {found.reason}")

    def _written(self, write: CacheWrite) -> fx.Node:
        """What the cache holds at the step's own positions: what this step writes."""
        root = example(write.root)
        shape = tuple(write.count if i == write.axis else int(n) for i, n in enumerate(root.shape))
        value = self._operand(write.value)
        own = tuple(int(n) for n in example(value).shape)
        if example(value).dtype != root.dtype:
            value = self.builder.method("to", value, root.dtype)
        if own == shape:
            return value
        if not write.lacks_axis:
            return self.builder.method("expand", value, *shape)
        slot = (*shape[: write.axis], *shape[write.axis + 1 :])
        value = value if own == slot else self.builder.method("expand", value, *slot)
        return self.builder.call(torch.unsqueeze, value, write.axis)

    def _shape(self, node: fx.Node, axis: int, position: fx.Node) -> tuple[int, ...]:
        count = int(example(position).shape[0])
        return tuple(count if i == axis else n for i, n in enumerate(shape_of(node) or ()))

    def _applied(self, node: fx.Node, axis: int, done: dict[fx.Node, fx.Node], position: fx.Node) -> fx.Node:
        """The op of `node` on shorter operands; where it names sizes, with the shorter ones."""
        name = name_of(node)
        source = node.args[0] if node.args else None
        if name in along.VIEWS | along.EXPANSIONS and isinstance(source, fx.Node):
            value = done[source] if source in done else self._operand(source)
            shape = self._shape(node, axis, position)
            if name in along.VIEWS:
                return self.builder.call(torch.reshape, value, shape)
            return self.builder.method("expand", value, *shape)
        for operand in node.all_input_nodes:
            if operand not in done:
                done[operand] = self._operand(operand)
        return self._same(node, done)

    def _assembled(self, node: fx.Node, axis: int, found: along.Assembled, position: fx.Node) -> fx.Node:
        value, shape = example(node), self._shape(node, axis, position)
        make = torch.zeros if "zeros" in name_of(node) else torch.empty
        buffer = self.builder.call(make, shape, dtype=value.dtype, device=value.device)
        for write, source, place in found.writes:
            part = self._taken(source, place, position)
            index: Any = write.args[1] if write.target is operator.setitem else write.args[0].args[1]  # type: ignore[union-attr]
            self.builder.method("copy_", self.builder.call(operator.getitem, buffer, index), part)
        return buffer
