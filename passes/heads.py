"""Head repetition: what keys or values were before they were repeated to the query heads. Analysis only."""

from __future__ import annotations

from torch import fx

from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import name_of, shape_of


def without_repetition(node: fx.Node, query_heads: int, flow: DataFlow) -> fx.Node:
    """The node [B, Hkv, N, D] below a repetition in which query head h reads KV head h // group, or `node` itself."""
    shape = shape_of(node)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    base = shape_of(source) if source is not None else None
    if shape is None or source is None or base is None or shape[1] != query_heads or not flow.is_pure_copy(node):
        return node
    name = name_of(node)
    if name in ("contiguous", "clone"):
        below = without_repetition(source, query_heads, flow)
        return node if below is source else below
    same_rest = len(base) == 4 and base[0] == shape[0] and base[2:] == shape[2:]
    if name == "repeat_interleave" and same_rest:
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        return source if dim in (1, -3) and shape[1] % base[1] == 0 else node
    if name in ("expand", "repeat") and same_rest and base[1] == 1:
        return source
    if name in ("reshape", "view", "flatten") and len(base) == 5 and base[1] * base[2] == query_heads:
        return _expanded(source, base) or node
    return node


def _expanded(node: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
    """What was [B, Hkv, N, D] before [B, Hkv, 1, N, D] and its expansion to [B, Hkv, G, N, D]."""
    unit = node.args[0] if name_of(node) in ("expand", "repeat") else None
    if not isinstance(unit, fx.Node) or shape_of(unit) != (*shape[:2], 1, *shape[3:]):
        return None
    source = unit.args[0]
    if not isinstance(source, fx.Node) or shape_of(source) != (*shape[:2], *shape[3:]):
        return None
    return source if name_of(unit) in ("unsqueeze", "getitem", "view", "reshape") else None
