"""flex_attention: its mask function, inlined over all indices at once, is a mask. Adds nodes only."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes import assemble
from sfi_compile.passes.assemble import Assembler
from sfi_compile.passes.base import Refusal
from sfi_compile.passes.shapes import shape_of
from sfi_compile.site import Form

_HINT = "keep score_mod None and express the mask in mask_mod, or use scaled_dot_product_attention"


def form(node: fx.Node, module: fx.GraphModule, builder: Assembler) -> Form:
    """The canonical form of a `flex_attention` node.

    Raises:
        Refusal: a score_mod that changes scores, a mask_mod that is not made of plain operators, or a log-sum-exp
            that is used.
    """
    arguments: Any = node.args
    query, key, value, score_mod, block_mask, scale = arguments[:6]
    others: Any = node.args[8] if len(node.args) > 8 else ()
    used = [user for user in node.users if user.users]
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in used) or not used:
        raise Refusal("flex-attention", "more than the output of flex_attention is used", _HINT)
    scores = _graph(module, score_mod)
    if scores is None or _output(scores) is not next(n for n in scores.nodes if n.op == "placeholder"):
        raise Refusal("flex-attention", "flex_attention with a score_mod that changes scores", _HINT)
    shapes = [shape_of(n) if isinstance(n, fx.Node) else None for n in (query, key)]
    if any(s is None or len(s) != 4 for s in shapes) or not isinstance(scale, (int, float)):
        raise Refusal("flex-attention", f"flex_attention over {shapes[0]} and {shapes[1]}, scale {scale}", _HINT)
    (batch, heads, queries, _), context = shapes[0] or (), (shapes[1] or ())[2]
    inner = _graph(module, block_mask[-1]) if isinstance(block_mask, tuple) else None
    with module.graph.inserting_before(used[0]):
        mask = assemble.everything(builder, context, example(key).device)
        if inner is not None:
            mask = builder.call(operator.and_, mask, _inlined(builder, inner, (batch, heads, queries, context), others))
        tensors: Any = (query, key, value, mask)
        result, repeats = assemble.finished(builder, used[0], tensors, float(scale))
    return Form("flex_attention", result, result, used[0], repeats)


def _graph(module: fx.GraphModule, node: Any) -> fx.Graph | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    inner = getattr(module, str(node.target), None)
    return inner.graph if isinstance(inner, fx.GraphModule) else None


def _output(graph: fx.Graph) -> Any:
    found: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    return found[0] if isinstance(found, (tuple, list)) and len(found) == 1 else found


def _inlined(builder: Assembler, graph: fx.Graph, sizes: tuple[int, ...], others: Any) -> fx.Node:
    """The value of `mask_mod(b, h, q, kv)` for all indices: bool, broadcastable to `sizes`."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    device = torch.device("cpu") if not inputs else example(inputs[0]).device
    values: dict[fx.Node, Any] = dict(zip(inputs[4:], others, strict=True))
    for axis, (node, size) in enumerate(zip(inputs[:4], sizes, strict=False)):
        if node.users:
            counted = builder.call(torch.arange, size, device=device)
            values[node] = builder.call(torch.reshape, counted, tuple(-1 if i == axis else 1 for i in range(4)))
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            add = builder.method if node.op == "call_method" else builder.call
            values[node] = add(node.target, *args, **kwargs)
        elif node.op == "get_attr":
            raise Refusal("flex-attention", f"the mask_mod of flex_attention holds {node.target}", _HINT)
    found = values.get(_output(graph))
    shape = shape_of(found) if isinstance(found, fx.Node) else None
    if shape is None or len(shape) not in (0, 4):
        raise Refusal("flex-attention", f"the mask_mod of flex_attention gives {shape}", _HINT)
    mask: Any = found
    return mask if len(shape) == 4 else builder.call(torch.reshape, mask, (1, 1, 1, 1))
