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
from sfi_compile.site import CacheWrite, Guard, MatchResult, Rejection, Site

_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention
_SDPA = frozenset({torch.nn.functional.scaled_dot_product_attention, _ATEN_SDPA, _ATEN_SDPA.default})
_OPAQUE = {
    "multi_head_attention_forward": "nn.MultiheadAttention",
    "_native_multi_head_attention": "nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "nn.TransformerEncoderLayer",
}
_SOFTMAX = frozenset({torch.softmax, torch.nn.functional.softmax, torch._softmax})
_PRODUCTS = frozenset({torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, operator.matmul})
_STATIC_HINT = 'use a preallocated cache: StaticCache, or generate(cache_implementation="static")'
_MOST_POSITION_NODES = 64
"""A position that takes more nodes than this to compute is not a position."""


@dataclasses.dataclass(frozen=True)
class _Refusal(Exception):
    """Carries a rejection's parts to the one place that records it."""

    code: str
    explanation: str
    hint: str


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
        except _Refusal as refusal:
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
        raise _Refusal("opaque-module", f"{_OPAQUE[name]} hides its attention in one call", "write attention with sdpa")
    if name == "flex_attention":
        raise _Refusal("flex-attention", "flex_attention nodes are not rewritten", 'use attn_implementation="sdpa"')
    if node.target in _SOFTMAX:
        _refuse_softmax_chain(node, flow)
    if isinstance(node.target, torch._ops.HigherOrderOperator) and _holds_attention(node):
        raise _Refusal("nested-graph", f"attention is inside a graph of its own, of {name}", "call attention outside")
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
                    raise _Refusal(
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
        raise _Refusal("rank", f"query, key, value have shapes {q_shape}, {k_shape}, {v_shape}", "use 4-D heads")
    batch, query_heads, query_len, key_dim = q_shape
    if query_len != 1:
        raise _Refusal("query-length", f"{query_len} new tokens in one step", "feed one token a step")
    if given.get("dropout_p"):
        raise _Refusal("dropout", f"dropout_p is {given['dropout_p']}", "call model.eval()")
    if given.get("is_causal"):
        raise _Refusal("is-causal", "is_causal=True with one query sees one key", "pass attn_mask instead")
    scale = given.get("scale")
    if scale is None:
        scale = key_dim**-0.5
    if not isinstance(scale, (int, float)):
        raise _Refusal("scale", f"the scale is computed in the graph ({scale})", "pass a number")
    key, value = _without_repetition(key, query_heads), _without_repetition(value, query_heads)
    kv_shape = axes.shape_of(key)
    if kv_shape is None or axes.shape_of(value) is None or kv_shape[:3] != axes.shape_of(value)[:3]:  # type: ignore[index]
        raise _Refusal("heads", f"keys {kv_shape} and values {axes.shape_of(value)} disagree", "cache both alike")
    kv_heads, context = kv_shape[1], kv_shape[2]
    if kv_shape[0] != batch or query_heads % kv_heads:
        raise _Refusal("heads", f"{query_heads} query heads over keys {kv_shape}", "make query heads a multiple")
    origin = axes.trace(key, axes.named("bhsd", kv_shape))
    if origin.blocked is None and not origin.leaves:
        return None  # the cache is made in this step, which is a prompt of one token
    key_write, key_constants = _write(key, "keys", node, flow)
    value_write, value_constants = _write(value, "values", node, flow)
    _check_position(key_write, flow)
    mask, mask_sources = _mask(mask, (batch, query_heads, query_len, context), node, flow)
    tensor = example(key)
    dtypes = tuple(example(n).dtype for n in (query, key, value))
    if len(set(dtypes)) != 1:
        raise _Refusal("dtype", f"query, keys, values are {dtypes}", "keep the cache in the model's dtype, no autocast")
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


def _write(node: fx.Node, what: str, attention: fx.Node, flow: DataFlow) -> tuple[CacheWrite, tuple[fx.Node, ...]]:
    """The cache write behind keys or values, and the inputs from which they are computed beside the cache."""
    found = axes.trace(node, axes.named("bhsd", axes.shape_of(node) or ()))
    if found.blocked is not None:
        raise _Refusal("not-commutable", f"{what}: {found.blocked.reason}", _STATIC_HINT)
    if len(found.leaves) != 1 or found.leaves[0].rows is not None:
        raise _Refusal("several-roots", f"{what} come from {len(found.leaves)} cached inputs", "cache one tensor")
    leaf = found.leaves[0]
    writes = flow.writes(leaf.source)
    if not writes:
        hint = "cross-attention stays dense" if leaf.source.op == "placeholder" else _STATIC_HINT
        raise _Refusal("no-cache-write", f"this step writes nothing into {leaf.source.name} ({what})", hint)
    if len(writes) > 1:
        raise _Refusal("several-writes", f"{len(writes)} writes into {leaf.source.name} ({what})", _STATIC_HINT)
    write = writes[0]
    if flow.order[write] > flow.order[attention]:
        raise _Refusal("late-write", f"{write.name} comes after attention", "write the cache before attention")
    if any(flow.order[n] < flow.order[write] for n in found.computed):
        raise _Refusal("stale-read", f"{what} are computed before {write.name}", "read the cache after writing it")
    other = _disturbing_write(found, attention, flow)
    if other is not None:
        raise _Refusal("stale-read", f"{other.name} changes what {what} are computed from", "write the cache alone")
    axis = leaf.layout.index("s")
    index, value = _index_and_value(write, leaf.source, axis, what)
    if axes.shape_of(index) != (1,):
        raise _Refusal("cache-write", f"{write.name} writes positions {axes.shape_of(index)}", "write one position")
    # Both are read again at the attention node, and the position also before the step.
    for source, since, code in ((index, index, "position"), (value, write, "stale-read")):
        for other in flow.writes(source):
            if flow.order[since] < flow.order[other] < flow.order[attention]:
                raise _Refusal(code, f"{other.name} changes {source.name} in place", "update it after attention")
    return CacheWrite(write, leaf.source, leaf.layout, index, value), _constants(found, index, what, flow)


def _constants(found: axes.Trace, position: fx.Node, what: str, flow: DataFlow) -> tuple[fx.Node, ...]:
    """The inputs from which keys or values are computed beside the cache.

    A memory keeps what was computed when it was packed, so these must not change with the step. Whether their owner
    changes them between steps is for the runtime to watch.
    """
    changing = {n for n in flow.slice_of(position) if n.op == "placeholder"}
    inputs: dict[fx.Node, None] = {}
    for operand in found.fixed:
        for needed in flow.slice_of(operand):
            is_input = needed.op == "placeholder"
            tensor = isinstance(example(needed), torch.Tensor)
            if flow.writes(needed) or (is_input and (needed in changing or not tensor or _is_index(needed))):
                raise _Refusal(
                    "changing-operand",
                    f"{what} are computed from the cache and {operand.name}, which changes with {needed.name}",
                    "cache what attention reads, or scale the queries or the output instead",
                )
            if is_input:
                inputs[needed] = None
    return tuple(inputs)


def _is_index(node: fx.Node) -> bool:
    """Token ids, positions, lengths: what a step is fed."""
    return example(node).dtype in (torch.int64, torch.int32)


def _index_and_value(write: fx.Node, root: fx.Node, axis: int, what: str) -> tuple[fx.Node, fx.Node]:
    refused = _Refusal("cache-write", f"{what} are written by {write.format_node()}", "use index_copy_ or setitem")
    shape = axes.shape_of(root) or ()
    if write.args[0] is not root:
        raise refused
    index: Any
    value: Any
    if write.target == "index_copy_" and len(write.args) == 4:
        _, dim, index, value = write.args
        if not isinstance(dim, int) or dim % len(shape) != axis:
            raise refused
    elif write.target is operator.setitem:
        items = write.args[1] if isinstance(write.args[1], tuple) else (write.args[1],)
        if len(items) <= axis or any(item != slice(None) for i, item in enumerate(items) if i != axis):
            raise refused
        index, value = items[axis], write.args[2]
    else:
        raise refused
    if not isinstance(index, fx.Node) or not isinstance(value, fx.Node):
        raise refused
    expected = tuple(1 if i == axis else n for i, n in enumerate(shape))
    if axes.shape_of(value) != expected:
        raise refused
    return index, value


def _check_position(write: CacheWrite, flow: DataFlow) -> None:
    needed = flow.slice_of(write.index)
    if example(write.index).dtype not in (torch.int64, torch.int32):
        raise _Refusal("position", f"positions are {example(write.index).dtype}", "index with int64")
    if len(needed) > _MOST_POSITION_NODES:
        raise _Refusal("position", f"the position takes {len(needed)} nodes to compute", "pass it to the model")


def _mask(
    mask: Any, full: tuple[int, int, int, int], attention: fx.Node, flow: DataFlow
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    if not isinstance(mask, fx.Node):
        raise _Refusal("no-mask", "no mask tells which cached tokens are valid", "pass an attention mask")
    shape = axes.shape_of(mask)
    if shape is None or len(shape) != 4 or any(m not in (1, f) for m, f in zip(shape, full, strict=True)):
        raise _Refusal("mask-shape", f"mask {shape} over {full}", "use a mask [batch, heads or 1, 1, context]")
    if shape[3] != full[3]:
        raise _Refusal("mask-shape", f"mask {shape} says nothing about single tokens", "use a mask over the context")
    if shape[1] != 1:
        raise _Refusal("mask-heads", f"mask {shape} differs between heads", "use one mask for all heads")
    found = axes.trace(mask, axes.named("bhqs", shape))
    if found.blocked is not None:
        hint = "pass a 4-D mask, or a 2-D mask as long as the cache"
        raise _Refusal("mask-not-commutable", f"mask: {found.blocked.reason}", hint)
    write = _disturbing_write(found, attention, flow)
    if write is not None:
        hint = "build the mask anew, after everything that it reads was updated"
        raise _Refusal("mask-written", f"{write.name} changes the mask, or what it reads, in place", hint)
    return mask, found.sources


def _disturbing_write(found: axes.Trace, attention: fx.Node, flow: DataFlow) -> fx.Node | None:
    """A write in place that makes a value differ from what is computed anew, at the attention node, from its leaves."""
    for operand, reader in found.reads:
        for write in flow.writes(operand):
            if flow.order[reader] < flow.order[write] < flow.order[attention]:
                return write
    inner = [n for n in (*found.computed, *found.sources) if flow.origin(n).op not in ("placeholder", "get_attr")]
    return next((w for n in inner for w in flow.writes(n) if flow.order[w] < flow.order[attention]), None)


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
