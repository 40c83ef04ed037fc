"""commute_gather: push the support gather of every fast branch up through sequence-pointwise ops to the cache root.

gather(op(x)) = op(gather(x)) for every op that is pointwise along the sequence axis, so the fast branch can recompute a
few positions of keys, values and mask from the roots, and the context-sized values above it die. A gather of the very
position that this step writes is the value written: it does not touch the cache at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module, example
from sfi_compile.passes import axes
from sfi_compile.passes.base import Builder, Pass, VerificationError, Work, transfer
from sfi_compile.passes.dataflow import is_impure
from sfi_compile.site import CacheWrite

_COND = torch.ops.higher_order.cond
_GATHER = torch.ops.sfi.gather.default


@dataclasses.dataclass(frozen=True)
class CommuteGather(Pass):
    """Rewrites the fast branches of a private copy; a gather that already reads a root stays as it is."""

    name: ClassVar[str] = "commute_gather"

    def apply(self, work: Work) -> Work:
        """The guarded graph whose fast branches read roots, written values, and values without a sequence axis."""
        module = copy_graph_module(work.graph)
        match = transfer(work.matched, work.graph.graph, module.graph)
        writes = [write for site in match.sites for write in (site.key_write, site.value_write)]
        for cond in [n for n in module.graph.nodes if n.target is _COND]:
            _Branches(module, cond, writes).commute()
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module, match=match)


class _Branches:
    """The two branches of one cond, edited together: both always take the same operands."""

    def __init__(self, module: fx.GraphModule, cond: fx.Node, writes: list[CacheWrite]) -> None:
        self.module, self.cond, self.writes = module, cond, writes
        arguments: tuple[Any, ...] = cond.args
        self.operands: list[fx.Node] = list(arguments[3])
        self.modules: dict[str, fx.GraphModule] = {}
        for branch in arguments[1:3]:
            self.modules[branch.target] = copy_graph_module(getattr(module, branch.target))
            setattr(module, branch.target, self.modules[branch.target])
        self.slow, self.fast = (m.graph for m in self.modules.values())
        self.inputs: list[fx.Node] = [n for n in self.fast.nodes if n.op == "placeholder"]
        self.builder = Builder(self.fast)

    def commute(self) -> None:
        """Push every gather of the fast branch as far up as it goes."""
        for gather in [n for n in self.fast.nodes if n.target is _GATHER]:
            arguments: tuple[Any, ...] = gather.args
            source, index, layout, out = arguments[:4]
            parent = self.operands[self.inputs.index(source)]
            found = axes.step(parent, layout)
            if isinstance(found, axes.Leaf) and found.source is parent and self._forwarded(found, index) is None:
                continue
            with self.fast.inserting_before(gather):
                gather.replace_all_uses_with(self._pushed(parent, layout, index, out))
            self.fast.erase_node(gather)
        self.fast.eliminate_dead_code(is_impure_node=is_impure)
        self.cond.args = (*self.cond.args[:3], tuple(self.operands))
        for branch in self.modules.values():
            branch.graph.lint()
            branch.recompile()

    def _is(self, branch_node: Any, parent: fx.Node) -> bool:
        return branch_node in self.inputs and self.operands[self.inputs.index(branch_node)] is parent

    def _operand(self, parent: fx.Node) -> fx.Node:
        """The fast branch's input for a node of the parent graph; added to both branches if it is new."""
        if parent in self.operands:
            return self.inputs[self.operands.index(parent)]
        if parent.graph is not self.module.graph:
            raise VerificationError(f"{parent.name} is not a node of the guarded graph")
        self.operands.append(parent)
        for graph in (self.slow, self.fast):
            last = [n for n in graph.nodes if n.op == "placeholder"][-1]
            with graph.inserting_after(last):
                added: fx.Node = graph.placeholder(f"from_{parent.name}")
            added.meta["example_value"] = example(parent)
        self.inputs.append(added)
        return added

    def _forwarded(self, leaf: axes.Leaf, index: fx.Node) -> CacheWrite | None:
        """The write into `leaf` whose own position is gathered: what is read is what it wrote."""
        if leaf.rows is not None:
            return None
        return next((w for w in self.writes if w.root is leaf.source and self._is(index, w.index)), None)

    def _pushed(self, node: fx.Node, layout: str, index: fx.Node, out: str) -> fx.Node:
        """`gather(node, index)` with axes `out`, computed in the fast branch from values one or more levels up."""
        if not layout:
            return self._operand(node)  # without axes, it has no say in the result's dtype: keep it so
        if "s" not in layout:
            return self._aligned(self._operand(node), layout, out)
        found = axes.step(node, layout)
        if isinstance(found, axes.View):
            return self._pushed(found.source, found.layout, index, out)
        if isinstance(found, axes.Leaf):
            return self._leaf(found, index, out)
        if isinstance(found, axes.Arange):
            return self._positions(found, example(node).dtype, index, out)
        if isinstance(found, axes.Fill):
            value = example(node)
            return self.builder.call(torch.full, (1,) * len(out), found.value, dtype=value.dtype, device=value.device)
        if isinstance(found, axes.Pointwise):
            done = {n: self._pushed(n, names, index, out) for n, names in found.layouts.items()}
            return self._same(node, done)
        if isinstance(found, axes.Table):
            lookup = tuple(self._pushed(i, found.layouts[i], index, out) for i in found.indices)
            value_node = self.builder.call(torch.ops.aten.index.Tensor, self._operand(found.source), list(lookup))
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

    def _leaf(self, leaf: axes.Leaf, index: fx.Node, out: str) -> fx.Node:
        write = self._forwarded(leaf, index)
        if write is not None:
            value = self._operand(write.value)
            if example(value).dtype != example(leaf.source).dtype:
                value = self.builder.method("to", value, example(leaf.source).dtype)
            return self._aligned(value, leaf.layout, out)
        rows = None if leaf.rows is None else self._operand(leaf.rows)
        return self.builder.call(_GATHER, self._operand(leaf.source), index, leaf.layout, out, rows)

    def _positions(self, arange: axes.Arange, dtype: torch.dtype, index: fx.Node, out: str) -> fx.Node:
        several = example(index).dim() == 3
        # Memory slots, of which the empty ones hold -1: they count as position 0, as in `sfi::gather`.
        value = self.builder.call(torch.clamp, index, 0) if several else index
        value = self._aligned(value, "bhs" if several else "s", out)
        if arange.step != 1:
            value = self.builder.call(torch.mul, value, arange.step)
        if arange.start:
            value = self.builder.call(torch.add, value, arange.start)
        return value if example(value).dtype == dtype else self.builder.method("to", value, dtype)

    def _aligned(self, node: fx.Node, layout: str, out: str) -> fx.Node:
        """Axes in the order of `out`, of size one where `layout` lacks them."""
        shape = tuple(int(n) for n in example(node).shape)
        sizes = {name: size for name, size in zip(layout, shape, strict=True) if name != "1"}
        order = [name for name in layout if name != "1"]
        wanted = sorted(order, key=out.index)
        if order != wanted:
            node = self.builder.call(torch.reshape, node, tuple(sizes[n] for n in order))
            node = self.builder.call(torch.permute, node, tuple(order.index(n) for n in wanted))
        full = tuple(sizes.get(name, 1) for name in out)
        return node if tuple(example(node).shape) == full else self.builder.call(torch.reshape, node, full)
