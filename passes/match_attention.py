"""match: find every attention site of a decode graph, or say why it must stay dense. Analysis only: nothing is changed.

General rules of data flow, no model names: an attention node whose keys and values come, through nodes that are
pointwise along the sequence axis, from a graph input that this step writes its own token into.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import example, module_path
from sfi_compile.passes import axes
from sfi_compile.passes.base import Pass, Work
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.reads import Refusal, cache_write, check_position, checked_mask
from sfi_compile.site import Guard, MatchResult, Rejection, Site

_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention
_SDPA = frozenset({torch.nn.functional.scaled_dot_product_attention, _ATEN_SDPA, _ATEN_SDPA.default})
_OPAQUE = {
    "multi_head_attention_forward": "nn.MultiheadAttention",
    "_native_multi_head_attention": "nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "nn.TransformerEncoderLayer",
}
_SOFTMAX = frozenset({torch.softmax, torch.nn.functional.softmax, torch._softmax})
_PRODUCTS = frozenset({torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, operator.matmul})


@dataclasses.dataclass(frozen=True)
class MatchAttention(Pass):
    """Frozen Site records, Rejections, and the Guard that all sites share."""

    name: ClassVar[str] = "match"

    def apply(self, work: Work) -> Work:
        """Fill in `work.match`."""
        return dataclasses.replace(work, match=match(work.graph.graph))


def match(graph: fx.Graph) -> MatchResult:
    """All sites and rejections of a graph, in program order."""
    flow = DataFlow(graph)
    sites: list[Site] = []
    rejections: list[Rejection] = []
    for node in graph.nodes:
        try:
            site = _site(node, flow)
        except Refusal as refusal:
            where = module_path(node)
            rejections.append(Rejection(refusal.code, where, refusal.explanation, refusal.hint))
            continue
        if site is not None:
            sites.append(site)
    guard = _guard(sites, graph, flow) if sites else None
    return MatchResult(tuple(sites), tuple(rejections), guard)


def is_prefill(graph: fx.Graph) -> bool:
    """Whether every sdpa node of a graph has several queries: a prompt or a chunk of one, not a decode step.

    Asks no symbolic size for its value, which would pin the graph to one prompt length. (Dynamo never makes a size of
    one symbolic, so a symbolic query length is a prompt's.)
    """
    attention = [n.args[0] if n.args else n.kwargs.get("query") for n in graph.nodes if n.target in _SDPA]
    queries = [example(n) for n in attention if isinstance(n, fx.Node)]
    lengths: list[Any] = [q.shape[-2] for q in queries if isinstance(q, torch.Tensor) and q.dim() == 4]
    return bool(lengths) and all(isinstance(n, torch.SymInt) or n > 1 for n in lengths)


def _site(node: fx.Node, flow: DataFlow) -> Site | None:
    if node.op == "call_method" and node.target == "softmax":
        _refuse_softmax_chain(node, flow)
    if node.op != "call_function":
        return None
    if node.target in _SDPA:
        return _sdpa(node, flow)
    name = getattr(node.target, "__name__", "")
    if name in _OPAQUE:
        raise Refusal("opaque-module", f"{_OPAQUE[name]} hides its attention in one call", "write attention with sdpa")
    if name == "flex_attention":
        raise Refusal("flex-attention", "flex_attention nodes are not rewritten", 'use attn_implementation="sdpa"')
    if node.target in _SOFTMAX:
        _refuse_softmax_chain(node, flow)
    if isinstance(node.target, torch._ops.HigherOrderOperator) and _holds_attention(node):
        raise Refusal("nested-graph", f"attention is inside a graph of its own, of {name}", "call attention outside")
    return None


def _holds_attention(node: fx.Node) -> bool:
    """Whether a graph that a node runs (of a checkpoint, a cond) has an attention node."""
    module = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    inner = [
        module.get_submodule(name) for name in names if module is not None and name in dict(module.named_modules())
    ]
    return any(n.target in _SDPA for m in inner if isinstance(m, fx.GraphModule) for n in m.graph.nodes)


def _refuse_softmax_chain(node: fx.Node, flow: DataFlow) -> None:
    """A softmax whose result is multiplied with something that comes from a written cache is attention by hand."""
    frontier, seen = [node], set()
    while frontier:
        current = frontier.pop()
        for user in current.users:
            method = user.target if user.op == "call_method" else None
            if user.target in _PRODUCTS or method in ("matmul", "bmm", "__matmul__"):
                if any(_comes_from_a_cache(n, flow) for n in user.all_input_nodes if n is not current):
                    raise Refusal(
                        "softmax-chain",
                        "attention written as a softmax chain is not rewritten",
                        'use attn_implementation="sdpa"',
                    )
                return
            if user not in seen and (method in ("to", "type_as", "float") or "dropout" in str(user.target)):
                seen.add(user)
                frontier.append(user)


def _comes_from_a_cache(node: fx.Node, flow: DataFlow) -> bool:
    """Whether a value is computed from a written input of three axes or more, other than through attention."""
    frontier, seen = [node], {node}
    while frontier:
        current = frontier.pop()
        if current.op == "placeholder" and flow.writes(current) and len(axes.shape_of(current) or ()) >= 3:
            return True
        if current.target in _SDPA:
            continue
        new = [n for n in current.all_input_nodes if n not in seen]
        seen.update(new)
        frontier += new
    return False


def _sdpa(node: fx.Node, flow: DataFlow) -> Site | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
    q_shape, k_shape, v_shape = (axes.shape_of(n) if isinstance(n, fx.Node) else None for n in (query, key, value))
    if q_shape is None or k_shape is None or v_shape is None or {len(q_shape), len(k_shape), len(v_shape)} != {4}:
        raise Refusal("rank", f"query, key, value have shapes {q_shape}, {k_shape}, {v_shape}", "use 4-D heads")
    batch, query_heads, query_len, key_dim = q_shape
    if query_len != 1:
        raise Refusal("query-length", f"{query_len} new tokens in one step", "feed one token a step")
    if given.get("dropout_p"):
        raise Refusal("dropout", f"dropout_p is {given['dropout_p']}", "call model.eval()")
    if given.get("is_causal"):
        raise Refusal("is-causal", "is_causal=True with one query sees one key", "pass attn_mask instead")
    scale = given.get("scale")
    if scale is None:
        scale = key_dim**-0.5
    if not isinstance(scale, (int, float)):
        raise Refusal("scale", f"the scale is computed in the graph ({scale})", "pass a number")
    key, value = _without_repetition(key, query_heads), _without_repetition(value, query_heads)
    kv_shape = axes.shape_of(key)
    if kv_shape is None or axes.shape_of(value) is None or kv_shape[:3] != axes.shape_of(value)[:3]:  # type: ignore[index]
        raise Refusal("heads", f"keys {kv_shape} and values {axes.shape_of(value)} disagree", "cache both alike")
    kv_heads, context = kv_shape[1], kv_shape[2]
    if kv_shape[0] != batch or query_heads % kv_heads:
        raise Refusal("heads", f"{query_heads} query heads over keys {kv_shape}", "make query heads a multiple")
    origin = axes.trace(key, axes.named("bhsd", kv_shape))
    if origin.blocked is None and not origin.leaves:
        return None  # the cache is made in this step, which is a prompt of one token
    key_write, key_constants = cache_write(key, "keys", node, flow)
    value_write, value_constants = cache_write(value, "values", node, flow)
    check_position(key_write, flow)
    mask, mask_sources = checked_mask(mask, (batch, query_heads, query_len, context), node, flow)
    tensor = example(key)
    dtypes = tuple(example(n).dtype for n in (query, key, value))
    if len(set(dtypes)) != 1:
        raise Refusal("dtype", f"query, keys, values are {dtypes}", "keep the cache in the model's dtype, no autocast")
    return Site(
        module=module_path(node),
        form="sdpa",
        node=node,
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=float(scale),
        key_write=key_write,
        value_write=value_write,
        batch=batch,
        query_heads=query_heads,
        kv_heads=kv_heads,
        query_len=query_len,
        key_dim=key_dim,
        value_dim=v_shape[3],
        context=context,
        dtype=tensor.dtype,
        device=tensor.device,
        repeats_heads=k_shape[1] != kv_heads,
        constants=(*key_constants, *value_constants),
        context_sources=(key_write.root, value_write.root, *mask_sources),
    )


def _without_repetition(node: fx.Node, query_heads: int) -> fx.Node:
    """The [B, Hkv, N, D] node below a head repetition (query head h reads KV head h // group), or `node` itself."""
    shape = axes.shape_of(node)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    base = axes.shape_of(source) if source is not None else None
    if shape is None or source is None or base is None or shape[1] != query_heads:
        return node
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "repeat_interleave" and len(base) == 4:
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        if dim in (1, -3) and shape[1] % base[1] == 0 and base[2:] == shape[2:]:
            return source
    if name in ("reshape", "view", "flatten") and len(base) == 5 and base[1] * base[2] == query_heads:
        # [B, Hkv, G, N, D], expanded along G from a unit axis.
        unit = source.args[0] if source.target == "expand" and isinstance(source.args[0], fx.Node) else None
        unit_shape = axes.shape_of(unit) if unit is not None else None
        if unit is not None and unit_shape is not None and unit_shape[2] == 1:
            found = axes.step(unit, "bh1sd")
            if isinstance(found, axes.View) and len(found.layout) == 4:
                return found.source
    return node


def _guard(sites: list[Site], graph: fx.Graph, flow: DataFlow) -> Guard:
    attention = {n for n in graph.nodes if n.target in _SDPA}
    last, telling = sites[-1], False
    for site in reversed(sites):
        if not attention.isdisjoint(flow.slice_of(site.key_write.value)):
            last, telling = site, True
            break
    positions = dict.fromkeys(w.index for site in sites for w in (site.key_write, site.value_write))
    return Guard(tuple(positions), _tokens(graph, flow, last.batch, last.query_len), last.key_write, telling)


def _tokens(graph: fx.Graph, flow: DataFlow, batch: int, query_len: int) -> fx.Node | None:
    """The token ids: the integer input [batch, query_len] that is looked up in a table as long as an output is wide.

    Positions and token types may be looked up, too. If no output (the logits) has the length of a table, the largest is
    the tokens'.
    """
    output = next(n for n in graph.nodes if n.op == "output")
    widths = {shape[-1] for n in output.all_input_nodes if (shape := axes.shape_of(n))}
    found: dict[fx.Node, tuple[bool, int]] = {}
    for node in graph.nodes:
        if node.target is torch.nn.functional.embedding and isinstance(node.args[0], fx.Node):
            weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
            ids, table = flow.origin(node.args[0]), axes.shape_of(weight) if isinstance(weight, fx.Node) else None
            if ids.op == "placeholder" and axes.shape_of(ids) == (batch, query_len) and table is not None:
                key = (table[0] in widths, table[0])
                found[ids] = max(key, found.get(ids, key))
    return max(found, key=found.__getitem__, default=None)
