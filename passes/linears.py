"""Linear layers of few rows, in half precision on a GPU, become `sfi::linear`: one operator for those of one input.

What it may touch: `torch.nn.functional.linear` of a weight that is an input of the graph, dense, and used for nothing
but linear layers. Quantised weights (tensor subclasses), small ones, and those of a vocabulary stay as they are.
Imports compat, `dataflow`, base, and the kernel's limits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from sfi_compile.compat.dynamo import example
from sfi_compile.kernels.linear_tiles import BLOCK_M, MOST_WEIGHTS
from sfi_compile.passes.base import Builder
from sfi_compile.passes.dataflow import DataFlow

LEAST = 2**20
"""Elements of all weights of an operator, at least: the launch takes longer than reading fewer."""
WIDEST = 2**16
"""Rows of a weight, at most: with as many, any kernel reads at the memory's speed."""
_LINEAR = torch.nn.functional.linear
_HALVES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear layer."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def combine(graph: fx.Graph, device_type: str = "cuda") -> None:
    """Replace the linear layers of a graph that `sfi::linear` computes faster, in place."""
    flow = DataFlow(graph)
    groups: list[list[Linear]] = []
    latest: dict[fx.Node, list[Linear]] = {}
    for node in flow.nodes:
        found = _linear(node, flow, device_type)
        if found is None:
            continue
        group = latest.get(found.x)
        if group is None or len(group) == MOST_WEIGHTS or _written_since(group[0].node, found, flow):
            group = latest[found.x] = []
            groups.append(group)
        group.append(found)
    builder = Builder(graph) if groups else None
    for group in groups:
        if builder is not None and sum(math.prod(example(one.weight).shape) for one in group) >= LEAST:
            _replace(group, builder)


def _linear(node: fx.Node, flow: DataFlow, device_type: str) -> Linear | None:
    """The linear layer that a node is, if its operands are such as `sfi::linear` takes."""
    if node.op != "call_function" or node.target is not _LINEAR:
        return None
    given: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not all(isinstance(n, fx.Node) and isinstance(example(n), FakeTensor) for n in (x, weight, bias or x)):
        return None
    values: list[Tensor] = [example(n) for n in (x, weight, bias or weight, node)]
    fixed = all(isinstance(size, int) for value in values for size in value.shape)
    one_kind = len({(v.dtype, v.device) for v in values}) == 1 and values[0].dtype in _HALVES
    if not fixed or not one_kind or values[0].device.type != device_type:
        return None
    if values[1].dim() != 2 or (bias is not None and values[2].shape != values[1].shape[:1]):
        return None
    width, depth = values[1].shape
    rows = math.prod(values[0].shape[:-1])
    if not 0 < rows <= BLOCK_M or width > WIDEST or depth % 16 or not values[1].is_contiguous():
        return None
    constant = all(_is_constant(n, flow) for n in (weight, bias or weight))
    return Linear(node, x, weight, bias) if constant else None


def _is_constant(node: fx.Node, flow: DataFlow) -> bool:
    """Whether a node is an input that only linear layers read."""
    given = node.op == "placeholder" and not flow.writes(node)
    return given and all(user.target is _LINEAR and user.args[:1] != (node,) for user in node.users)


def _written_since(first: fx.Node, other: Linear, flow: DataFlow) -> bool:
    """Whether the input of a linear layer was another one at `first`."""
    return flow.reaching_writes(other.x, other.node) != flow.reaching_writes(other.x, first)


def _replace(group: list[Linear], builder: Builder) -> None:
    with builder.graph.inserting_before(group[0].node):
        weights, biases = [one.weight for one in group], [one.bias for one in group]
        made = builder.call(torch.ops.sfi.linear.default, group[0].x, weights, biases)
        parts = [builder.call(operator.getitem, made, i) for i in range(len(group))]
    for one, part in zip(group, parts, strict=True):
        one.node.replace_all_uses_with(part)
        builder.graph.erase_node(one.node)
