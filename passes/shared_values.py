"""Values that every layer reads, such as the cosines of rotary embeddings, are computed once a step on a GPU.

Inductor writes what is computed element by element out at every reader, and analyses, schedules and writes it as often:
with dozens of layers, that is a tenth of the compilation. Imports compat, `dataflow` and base.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.base import Builder
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import is_pointwise

MANY = 8
"""Readers from which a value is kept."""
LARGEST = 2**16
"""Elements of such a value, at most."""


def keep(graph: fx.Graph, device_type: str = "cuda") -> None:
    """Put a copy in the place of each of those values, in place: a tensor, which readers do not compute."""
    flow = DataFlow(graph)
    found = [node for node in flow.nodes if _is_shared(node, flow, device_type)]
    if not found:
        return
    builder = Builder(graph)
    for node in found:
        readers = list(node.users)
        with graph.inserting_after(node):
            kept = builder.call(torch.ops.sfi.still.default, node)
        for reader in readers:
            reader.replace_input_with(node, kept)


def _is_shared(node: fx.Node, flow: DataFlow, device_type: str) -> bool:
    value = example(node)
    if (
        not is_pointwise(node)
        or not isinstance(value, FakeTensor)
        or len(node.users) < MANY
        or value.device.type != device_type
    ):
        return False
    small = value.dtype.is_floating_point and value.numel() <= LARGEST
    # What is written into, or is part of an input, is no mere expression; what is returned may share memory with more.
    returned = any(user.op == "output" for user in node.users)
    return small and not returned and not flow.writes(node) and flow.origin(node).op != "placeholder"
