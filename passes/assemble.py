"""Puts a canonical node together: axes in order, heads without repetition, one mask of all terms. Adds nodes only."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.base import Builder, Refusal
from sfi_compile.passes.chains import Chain, Term, refusal
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.heads import without_repetition
from sfi_compile.passes.products import Operand, Product, unpermuted
from sfi_compile.passes.shapes import name_of, shape_of

NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of a site."""

    batch: int
    query_heads: int
    kv_heads: int
    query_len: int


class Assembler(Builder):
    """Adds nodes to a graph, and knows what is written in place in it."""

    def __init__(self, graph: fx.Graph, flow: DataFlow) -> None:
        super().__init__(graph)
        self.flow = flow


def finished(
    builder: Assembler,
    original: fx.Node,
    tensors: tuple[fx.Node, fx.Node, fx.Node, fx.Node],
    scale: float,
    softcap: float = 0.0,
    sinks: fx.Node | None = None,
    fill: fx.Node | None = None,
) -> tuple[fx.Node, bool]:
    """`sfi::attention` over (q, k, v, mask), and whether heads were repeated."""
    q, k, v, mask = tensors
    query_heads = (shape_of(q) or ())[1]
    bare_k, bare_v = (without_repetition(n, query_heads, builder.flow) for n in (k, v))
    if (shape_of(bare_k) or ())[:3] != (shape_of(bare_v) or ())[:3]:
        bare_k, bare_v = k, v  # only one of them shows its repetition
    k_shape, v_shape = shape_of(bare_k), shape_of(bare_v)
    if k_shape is None or v_shape is None or k_shape[:3] != v_shape[:3]:
        raise Refusal("heads", f"keys {k_shape} and values {v_shape} disagree", "cache both alike")
    if k_shape[0] != (shape_of(q) or ())[0] or query_heads % k_shape[1]:
        raise Refusal("heads", f"{query_heads} query heads over keys {k_shape}", "make query heads a multiple")
    dtypes = tuple(example(n).dtype for n in (q, bare_k, bare_v))
    if len(set(dtypes)) != 1:
        raise Refusal("dtype", f"query, keys, values are {dtypes}", "keep the cache in the model's dtype, no autocast")
    node = builder.call(torch.ops.sfi.attention.default, q, bare_k, bare_v, mask, scale, softcap, sinks, fill)
    node.meta["nn_module_stack"] = original.meta.get("nn_module_stack", {})
    return node, bare_k is not k and k_shape[1] != query_heads


def scaled(builder: Assembler, query: fx.Node, factor: Any, by: Any = torch.mul) -> fx.Node:
    """The query times what the graph computes, multiplied in float32 and rounded once."""
    dtype = example(query).dtype
    wide = builder.method("to", query, torch.promote_types(dtype, torch.float32))
    return builder.method("to", builder.call(by, wide, factor), dtype)


def shaped(builder: Assembler, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """The same elements in another shape, from below a reshape if that is where they had it."""
    if shape_of(node) == shape:
        return node
    source: Any = node.args[0] if node.args else None
    reshapes = name_of(node) in ("view", "reshape", "flatten") and example(node).dtype == example(source).dtype
    if reshapes and shape_of(source) == shape and builder.flow.is_pure_copy(node):
        below: fx.Node = source
        return below
    return builder.call(torch.reshape, node, shape)


def arranged(builder: Assembler, operand: Operand, wanted: str) -> fx.Node:
    """A factor with its axes in the order of `wanted`, of size one where it lacks a letter."""
    bare = unpermuted(operand)
    present = "".join(letter for letter in wanted if letter in bare.letters)
    node = bare.node
    if bare.letters != present:
        node = builder.call(torch.permute, node, tuple(bare.letters.index(letter) for letter in present))
    if present == wanted:
        return node
    sizes = dict(zip(present, shape_of(node) or (), strict=True))
    return builder.call(torch.reshape, node, tuple(sizes.get(letter, 1) for letter in wanted))


def four_axes(builder: Assembler, mask: fx.Node) -> fx.Node:
    """A mask of up to four axes, with four."""
    shape = shape_of(mask) or ()
    return shaped(builder, mask, (1,) * (4 - len(shape)) + shape) if len(shape) <= 4 else mask


def over_context(builder: Assembler, mask: fx.Node, context: int, device: torch.device) -> fx.Node:
    """A mask [., ., ., context or 1] with the whole context axis."""
    if (shape_of(mask) or ())[3] == context:
        return mask
    if example(mask).dtype == torch.bool:
        return builder.call(operator.and_, everything(builder, context, device), mask)
    zeros = builder.call(torch.zeros, (1, 1, 1, context), dtype=example(mask).dtype, device=device)
    return builder.call(torch.add, mask, zeros)


def everything(builder: Assembler, context: int, device: torch.device) -> fx.Node:
    """The mask that lets everything through, [1, 1, 1, context]."""
    return builder.call(torch.ones, (1, 1, 1, context), dtype=torch.bool, device=device)


def chain(builder: Assembler, found: Chain, new_tokens: int | None) -> tuple[fx.Node, fx.Node, bool]:
    """Canonical node of a softmax chain, its value in the shape of the chain's output, and whether heads are repeated.

    Args:
        builder: inserts before the chain's output.
        found: the chain.
        new_tokens: tokens that the step feeds a row, if that is known.

    Raises:
        Refusal: axes that do not come to [batch, heads, queries, context].
    """
    q, k = _queries_and_keys(builder, found.scores, found.order)
    for product, scale in found.others:
        more_q, more_k = _queries_and_keys(builder, product, None)
        if scale != found.scale:
            more_q = scaled(builder, more_q, scale / found.scale)
        q, k = _side_by_side(builder, q, more_q), _side_by_side(builder, k, more_k)
    v, out_letters = _values(builder, found)
    heads = _heads(found, q, k, new_tokens)
    batch, kv_heads = heads.batch, heads.kv_heads
    q_shape, k_shape, v_shape = (shape_of(n) or () for n in (q, k, v))
    q = shaped(builder, q, (batch, heads.query_heads, heads.query_len, q_shape[-1]))
    k, v = (shaped(builder, n, (batch, kv_heads, *s[-2:])) if math.prod(s[:-2]) == batch * kv_heads else n
            for n, s in ((k, k_shape), (v, v_shape)))  # fmt: skip
    for n, what in ((k, "keys"), (v, "values")):
        if len(shape_of(n) or ()) != 4:
            raise refusal(f"{what} {shape_of(n)} for {batch} rows of {kv_heads} heads")
    context = (shape_of(k) or ())[2]
    terms = [(term, _term(builder, term, heads)) for term in found.terms]
    mask = _mask(builder, terms, context, example(q).device)
    fill = _fill(builder, terms, found.forgives, example(q).device)
    sinks = None
    if found.sinks is not None:
        sinks = _regrouped(builder, found.sinks, (*found.sinks_shape[:-1], (shape_of(found.sinks) or ())[-1]), heads)
    for f in found.factors:
        factor = _regrouped(builder, f.node, (*f.shape[:-1], 1), heads) if f.shape else f.node
        q = scaled(builder, q, factor, torch.div if f.divides else torch.mul)
    tensors = (q, k, v, mask)
    node, repeats = finished(builder, found.output.node, tensors, found.scale, found.softcap, sinks, fill)
    sizes = dict(zip(found.output.letters, shape_of(found.output.node) or (), strict=True))
    result = shaped(builder, node, tuple(sizes[letter] for letter in out_letters))
    if out_letters != found.output.letters:
        result = builder.call(torch.permute, result, tuple(out_letters.index(n) for n in found.output.letters))
    return node, result, repeats


def _queries_and_keys(builder: Assembler, product: Product, order: tuple[int, ...] | None) -> tuple[fx.Node, fx.Node]:
    """Queries [lead..., rows, dim] and keys [lead..., context, dim] of a product."""
    letters = product.letters if order is None else "".join(product.letters[i] for i in order)
    lead, row, column = letters[:-2], letters[-2], letters[-1]
    contracted, left, right = product.contracted, product.left, product.right
    query, key = (right, left) if column in left.letters else (left, right)
    if len(contracted) != 1 or column in query.letters or row in key.letters:
        raise refusal("the product of queries and keys has other axes than those")
    return arranged(builder, query, lead + row + contracted), arranged(builder, key, lead + column + contracted)


def _side_by_side(builder: Assembler, one: fx.Node, other: fx.Node) -> fx.Node:
    """The features of two products: what is summed over in both."""
    leads = [(shape_of(n) or ())[:-1] for n in (one, other)]
    if len(leads[0]) != len(leads[1]):
        raise refusal(f"products of {leads[0]} and {leads[1]} are added")
    both = tuple(map(max, *leads))
    parts = [
        n if lead == both else builder.method("expand", n, *both, -1)
        for n, lead in zip((one, other), leads, strict=True)
    ]
    return builder.call(torch.cat, parts, -1)


def _values(builder: Assembler, found: Chain) -> tuple[fx.Node, str]:
    """Values [lead..., context, dim], and the letters of the output in that order."""
    product = found.output
    weights, values = product.left, product.right
    if weights.node is not found.weights:
        weights, values = values, weights
    if weights.node is not found.weights or values.node is found.weights or product.added is not None:
        raise refusal("the product of weights and values is not known")
    letters = weights.letters
    if found.weights_order is not None:
        below = [""] * len(letters)
        for axis, origin in enumerate(found.weights_order):
            below[origin] = letters[axis]
        letters = "".join(below)
    lead, row, column = letters[:-2], letters[-2], letters[-1]
    dims = [n for n in product.letters if n not in lead + row]
    if product.contracted != column or len(dims) != 1 or row not in product.letters or product.factor != 1.0:
        raise refusal("the product of weights and values has other axes than those")
    return arranged(builder, values, lead + column + dims[0]), lead + row + dims[0]


def _heads(found: Chain, q: fx.Node, k: fx.Node, new_tokens: int | None) -> Heads:
    """Rows, heads and queries, from queries [lead..., rows, dim] and keys [lead..., context, dim]."""
    q_shape, k_shape = shape_of(q) or (), shape_of(k) or ()
    q_lead, k_lead, rows = q_shape[:-2], k_shape[:-2], q_shape[-2]
    lead = tuple(max(a, b) for a, b in zip(q_lead, k_lead, strict=True))
    group = 1
    if len(lead) == 1:
        four = [s for s in (*found.shapes, *_before(q), *_before(k)) if len(s) == 4 and s[0] * s[1] == lead[0]]
        if four and q_lead == k_lead == lead:
            batch, kv_heads = four[0][:2]
        else:
            batch, kv_heads = lead[0], 1
    elif len(lead) in (2, 3):
        batch = lead[0]
        shared = [b for a, b in zip(lead[1:], k_lead[1:], strict=True) if a == b]
        kv_heads, group = math.prod(k_lead[1:]), math.prod(lead[1:]) // math.prod(k_lead[1:])
        if k_lead[1 : 1 + len(shared)] != tuple(shared):
            raise refusal(f"queries {q_shape} over keys {k_shape}")
    else:
        raise refusal(f"queries {q_shape} over keys {k_shape}")
    if k_lead[0] != lead[0] or q_lead != lead:
        raise refusal(f"queries {q_shape} over keys {k_shape}")
    if new_tokens is not None and rows != new_tokens:
        # Queries of a group as rows, which is the same as heads when there is one token.
        if new_tokens != 1:
            raise refusal(f"{rows} queries for {new_tokens} new tokens")
        group, rows = group * rows, 1
    return Heads(batch, kv_heads * group, kv_heads, rows)


def _before(node: fx.Node) -> list[tuple[int, ...]]:
    """Shapes that a tensor had before it was reshaped to this one."""
    shapes: list[tuple[int, ...]] = []
    while name_of(node) in ("view", "reshape", "flatten", "contiguous") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        shape = shape_of(node)
        if shape is not None:
            shapes.append(shape)
    return shapes


def _regrouped(builder: Assembler, node: fx.Node, shape: tuple[int, ...], heads: Heads) -> fx.Node:
    """What broadcasts to logits of `shape` [lead..., rows, columns], as what broadcasts to [B, Hq, Q, columns]."""
    own = shape_of(node) or ()
    own = (1,) * (len(shape) - len(own)) + own
    groups: list[tuple[tuple[int, ...], int]] = []
    axis = 0
    for size in (heads.batch, heads.query_heads, heads.query_len):
        start = axis
        while axis < len(shape) - 1 and math.prod(shape[start:axis]) < size:
            axis += 1
        groups.append((tuple(range(start, axis)), size))
    if math.prod(own[:-1]) == 1:
        return shaped(builder, node, (1, 1, 1, own[-1]))
    first = shape[0]
    if len(shape) == 3 and first == heads.batch * heads.query_heads and heads.query_len == shape[1]:
        # Rows and heads in one.
        if own[0] == 1:
            return shaped(builder, node, (1, 1, *own[1:]))
        return shaped(builder, node, (heads.batch, heads.query_heads, *own[1:]))
    sizes, expanded = [], list(own)
    for axes, size in groups:
        if math.prod(shape[a] for a in axes) != size:
            raise refusal(f"a term {own} beside logits {shape}")
        full = any(own[a] != 1 for a in axes)
        sizes.append(size if full else 1)
        for a in axes if full else ():
            expanded[a] = shape[a]
    if expanded != list(own):
        node = builder.method("expand", shaped(builder, node, own), *expanded)
    return shaped(builder, node, (*sizes, own[-1]))


_Terms = list[tuple[Term, fx.Node | None]]
"""Terms from the softmax upwards, each with a node that broadcasts to [B, Hq, Q, context]: bool of what is kept, or
float of what is added; None of a floor."""


def _mask(builder: Assembler, terms: _Terms, context: int, device: torch.device) -> fx.Node:
    """All terms in one: bool if they only let through and block, else float."""
    allowed: fx.Node | None = None
    added: fx.Node | None = None
    for term, node in terms:
        if term.kind == "add":
            added = node if added is None else builder.call(torch.add, added, node)
        elif node is not None:
            allowed = node if allowed is None else builder.call(operator.and_, allowed, node)
    if added is None:
        mask = everything(builder, context, device) if allowed is None else allowed
    else:
        mask = added if allowed is None else builder.call(torch.where, allowed, added, NEG_INF)
    return over_context(builder, mask, context, device)


def _fill(builder: Assembler, terms: _Terms, forgives: bool, device: torch.device) -> fx.Node | None:
    """What the softmax sees where `_mask` is False or -inf: a float that broadcasts to it; None if it sees nothing.

    It matters to a query whose tokens are all blocked: a softmax over equal numbers is a mean, one over -inf NaN.
    """
    fill: fx.Node | float = NEG_INF

    def tensor(value: fx.Node | float, dtype: torch.dtype) -> fx.Node:
        if isinstance(value, fx.Node):
            return value
        least = value if math.isinf(value) else max(value, torch.finfo(dtype).min)
        return builder.call(torch.full, (1, 1, 1, 1), least, dtype=dtype, device=device)

    for i, (term, node) in enumerate(reversed(terms)):
        number = term.number
        if term.kind == "add":
            fill = fill if fill == NEG_INF else builder.call(torch.add, tensor(fill, term.dtype), node)
        elif term.kind == "floor":
            fill = builder.call(torch.clamp, fill, min=number) if isinstance(fill, fx.Node) else max(fill, number)
        elif i == 0 or fill == number:
            fill = number
        else:
            fill = builder.call(torch.where, node, tensor(fill, term.dtype), tensor(number, term.dtype))
    if not terms or (fill == NEG_INF and forgives):
        return None
    return tensor(fill, terms[0][0].dtype)


def _term(builder: Assembler, term: Term, heads: Heads) -> fx.Node | None:
    if term.node is None:
        return None
    node = _regrouped(builder, term.node, term.shape, heads)
    if term.kind == "add" and not example(node).dtype.is_floating_point:
        node = builder.method("to", node, term.dtype)  # numbers, not a mask
    if term.kind == "drop":
        return builder.call(torch.logical_not, node)
    if term.kind == "add" and term.number != 1.0:
        return builder.call(torch.mul, node, term.number)
    return node
