"""Counters of a step: inputs of one whole number that say how far a cache is filled, often one for each layer.

On a GPU, each is a launch where it is advanced, and one that is advanced in the step keeps Inductor from computing what
depends on it (a mask) inside the kernels that read that. So the one that more is made of than of the others is copied
first, and all are advanced at once, at the end. Imports compat, base and `dataflow`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.base import Builder
from sfi_compile.passes.dataflow import DataFlow

_WHOLE = (torch.int32, torch.int64)


def combine(graph: fx.Graph, device_type: str = "cuda") -> None:
    """Advance all counters at once, and read the one that most depends on as it was, in place."""
    flow = DataFlow(graph)
    last = {flow.origin(source): node for node in flow.nodes for source in node.all_input_nodes}
    groups: dict[Any, dict[fx.Node, fx.Node]] = {}
    for node in flow.nodes:
        advance = _advance(node, flow, device_type)
        # Nothing may read the counter after it, by whatever name.
        if advance is not None and last[node] is advance:
            groups.setdefault((example(node).device, example(node).dtype, advance.args[1]), {})[node] = advance
    output = flow.nodes[-1]
    for (_, _, amount), advances in groups.items():
        if len(advances) < 2:
            continue
        for advance in advances.values():
            graph.erase_node(advance)
        fewest = min(len(counter.users) for counter in advances)
        for counter in advances:
            if len(counter.users) > fewest:
                _hold(counter, flow)
        with graph.inserting_before(output):
            added = graph.call_function(torch._foreach_add_, (list(advances), amount))
            added.meta["example_value"] = [example(counter) for counter in advances]


def _advance(counter: fx.Node, flow: DataFlow, device_type: str) -> fx.Node | None:
    """The one write into an input, if it is a counter."""
    value = example(counter) if counter.op == "placeholder" else None
    if not isinstance(value, FakeTensor) or value.device.type != device_type:
        return None
    if value.dtype not in _WHOLE or value.numel() != 1:
        return None
    writes = flow.writes(counter)
    if len(writes) != 1 or writes[0].users or writes[0].kwargs or len(writes[0].args) != 2:
        return None
    [advance] = writes
    adds = advance.op == "call_method" and advance.target == "add_" and advance.args[0] is counter
    return advance if adds and isinstance(advance.args[1], int) else None


def _hold(counter: fx.Node, flow: DataFlow) -> None:
    """Let everything read a copy of the counter."""
    readers = list(counter.users)
    first = min(readers, key=flow.order.__getitem__)
    builder = Builder(first.graph)
    with first.graph.inserting_before(first):
        held = builder.call(torch.ops.sfi.still.default, counter)
    for reader in readers:
        reader.replace_input_with(counter, held)
