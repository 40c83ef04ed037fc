"""Attention written out: product, scale, softcap, mask, softmax, product. Analysis only, for `canonicalise`.

From a softmax the chain is followed upwards to the product of queries and keys, and downwards to the product with the
values. Raises `Refusal` for a chain over a cache that has a link which is not known.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.passes.base import Refusal
from sfi_compile.passes.dataflow import DataFlow, mutated_argument
from sfi_compile.passes.links import CASTS, REGROUPS, products_above, softmax_input
from sfi_compile.passes.products import Product, order_of, product_of
from sfi_compile.passes.shapes import CAT, SAME, is_pointwise, name_of, shape_of

BLOCKING = -5000.0
"""Logits that a mask sets to less than this get no weight, whatever they were."""
_ADDS = frozenset(["add", "iadd", "add_", "__add__", "__radd__"])
_SUBS = frozenset(["sub", "isub", "sub_", "__sub__"])
_MULS = frozenset(["mul", "imul", "mul_", "__mul__", "__rmul__", "multiply"])
_DIVS = frozenset(["div", "truediv", "itruediv", "div_", "true_divide", "__truediv__"])
_FILLS = frozenset(["masked_fill", "masked_fill_"])


@dataclasses.dataclass(frozen=True)
class Term:
    """What is done to the logits beside the product."""

    kind: str
    """"add": added · "keep", "drop": a bool mask of what may, or may not, be attended to · "floor": the least logit."""
    node: fx.Node | None
    """None of a floor."""
    number: float
    """The factor of what is added; what the logits that are masked become; the floor."""
    shape: tuple[int, ...]
    """Of the logits that it broadcasts to, [..., queries, context]."""
    dtype: torch.dtype
    """Of those logits."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """A tensor or number computed in the graph that scales the logits."""

    node: fx.Node
    divides: bool
    shape: tuple[int, ...]
    """Of the logits, to which it broadcasts, the same for all of the context; empty for a number."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """softcap(scale · query · keyᵀ) + terms → softmax, beside sinks → · value."""

    scores: Product
    others: tuple[tuple[Product, float], ...]
    """Products that are added to the scores, each with its scale."""
    order: tuple[int, ...] | None
    """The permutation that follows the scores; None: none."""
    scale: float
    factors: tuple[Factor, ...]
    """What scales the logits as well."""
    softcap: float
    terms: tuple[Term, ...]
    sinks: fx.Node | None
    """Columns [..., queries or 1, C] beside the logits."""
    sinks_shape: tuple[int, ...]
    """Of the logits that they stand beside."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the logits, wherever they change."""
    weights: fx.Node
    """What is multiplied with the values."""
    weights_order: tuple[int, ...] | None
    output: Product
    links: tuple[fx.Node, ...]
    """All nodes of the chain."""
    forgives: bool
    """A softmax over nothing gives zeros, not NaN."""


def refusal(why: str) -> Refusal:
    """Of attention that is written out in a way that is not known."""
    hint = 'use scaled_dot_product_attention (attn_implementation="sdpa")'
    return Refusal("softmax-chain", f"attention written out: {why}", hint)


class _Reader:
    """Walks one chain upwards from its softmax."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.factor = 1.0
        self.factors: list[Factor] = []
        self.others: list[tuple[Product, float]] = []
        self.softcap = 0.0
        self.terms: list[Term] = []
        self.sinks: fx.Node | None = None
        self.sinks_shape: tuple[int, ...] = ()
        self.order: tuple[int, ...] | None = None
        self.shapes: list[tuple[int, ...]] = []
        self.links: list[fx.Node] = []
        self.stopped = ""

    def up(self, node: fx.Node, reader: fx.Node) -> Product | None:
        """Follow the logits from what `reader` reads up to their product."""
        while True:
            # What was written in place last is what is read.
            changed = [w for w in self.flow.reaching_writes(node, reader) if w is not node]
            if changed and self.flow.order[changed[-1]] > self.flow.order[node]:
                if _named(changed[-1]) is not _named(node):
                    self.stopped = f"{changed[-1].name} changes the logits through a view"
                    return None
                node = changed[-1]
            self.links.append(node)
            shape = shape_of(node)
            if shape is None or len(shape) < 2:
                self.stopped = f"{node.name} is no matrix"
                return None
            if not self.shapes or self.shapes[-1] != shape:
                self.shapes.append(shape)
            found = product_of(node)
            if found is not None:
                known = found.added is None or self._term("add", found.added, self.factor * found.weight, node)
                return found if known else None
            above = self._link(node, shape)
            if above is None:
                self.stopped = self.stopped or f"{name_of(node)} on the way to the softmax is not known"
                return None
            node, reader = above, node

    def _term(self, kind: str, node: fx.Node | None, number: float, logits: fx.Node) -> bool:
        if self.softcap or self.order is not None or self.factors or self.others:
            if node is None:
                return True  # nothing can have been masked yet
            self.stopped = f"{node.name} is added before softcap, scale, transposition or sum"
            return False
        self.terms.append(Term(kind, node, number, shape_of(logits) or (), example(logits).dtype))
        return True

    def _link(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
        """The logits one level up, through one op on them; None if it is not known."""
        name, args = name_of(node), node.args
        source: Any = args[0] if args else None
        other: Any = args[1] if len(args) > 1 else None
        above: Any = self._above(node, name, source, other, shape)
        return above if isinstance(above, fx.Node) else None

    def _above(self, node: fx.Node, name: str, source: Any, other: Any, shape: tuple[int, ...]) -> Any:
        args = node.args
        if not isinstance(source, fx.Node) and name not in (*_ADDS, *_MULS, "where", *CAT):
            return None
        if name in CASTS or name in SAME:
            return source
        if name in REGROUPS:
            kept = (shape_of(source) or ())[-1:] == shape[-1:] and self.order is None
            return source if kept else None
        if order_of(node) is not None:
            if self.order is not None or self.others:
                return None  # a second permutation, or of one product alone
            self.order = order_of(node)
            return source
        if name in _ADDS:
            return self._sum(node, source, other, shape)
        if name in _SUBS and isinstance(other, (int, float)):
            return source if self._may_shift() else None
        if name == "neg":
            self.factor = -self.factor
            return source
        if name in _SUBS and isinstance(other, fx.Node) and node.kwargs.get("alpha", 1) == 1:
            if self._is_maximum(other, source):
                return source if self._may_shift() else None
            return source if self._term("add", other, -self.factor, node) else None
        if name in _MULS or name in _DIVS:
            return self._scaled(node, source, other)
        if name in ("tanh", "tanh_") and not self.softcap:
            if self.factors or self.others or self.factor <= 0:
                return None
            self.softcap = self.factor
            return source
        if name in _FILLS:
            value = args[2] if len(args) > 2 else node.kwargs.get("value")
            return source if self._masks("drop", other, value, node) else None
        if name == "where" and len(args) == 3:
            kind, logits, value = (
                ("keep", args[1], args[2]) if self._is_logits(args[1], shape) else ("drop", args[2], args[1])
            )
            return logits if isinstance(logits, fx.Node) and self._masks(kind, source, value, node) else None
        if name in ("max", "maximum", "clamp", "clamp_min"):
            least = other if other is not None else node.kwargs.get("min")
            bounded = len(args) > 2 or node.kwargs.get("max") is not None
            number = self._number(least)
            if number is None or number * self.factor > BLOCKING or bounded or self.factor < 0:
                return None
            return source if self._term("floor", None, number * self.factor, node) else None
        if name in CAT and self.sinks is None:
            return self._beside(node, shape)
        return None

    def _sum(self, node: fx.Node, source: Any, other: Any, shape: tuple[int, ...]) -> Any:
        if node.kwargs.get("alpha", 1) != 1:
            return None
        if all(isinstance(n, fx.Node) and products_above([n]) for n in (source, other)):
            self.stopped = f"{node.name} adds two products"
            return self._two_products(node, source, other)
        pairs = [(a, b) for a, b in ((source, other), (other, source)) if self._is_logits(a, shape)]
        for logits, bias in pairs:
            if isinstance(bias, (int, float)):
                return logits if self._may_shift() else None
            if isinstance(bias, fx.Node) and (len(pairs) == 1 or products_above([logits])):
                return logits if self._term("add", bias, self.factor, node) else None
        return None

    def _two_products(self, node: fx.Node, source: Any, other: Any) -> Any:
        """Logits that are the sum of two products, as one product of all features of both would be."""
        reader = _Reader(self.flow)
        product = reader.up(other, node)
        plain = not (reader.terms or reader.softcap or reader.factors or reader.others or reader.sinks or reader.order)
        if product is None or not plain or self.order is not None:
            return None
        self.others.append((product, self.factor * reader.factor * product.factor))
        self.links += reader.links
        return source

    def _may_shift(self) -> bool:
        """Whether a number added to all logits changes nothing: before the softmax come no softcap, no sinks, and no
        other number that stands beside the logits."""
        shifted = all(term.kind == "add" or term.number == -math.inf for term in self.terms)
        return not self.softcap and self.sinks is None and shifted

    def _scaled(self, node: fx.Node, source: Any, other: Any) -> Any:
        divides = name_of(node) in _DIVS
        if divides and node.kwargs:
            return None
        logits, by = (source, other) if self._is_logits(source, shape_of(node) or ()) or divides else (other, source)
        number = self._number(by)
        if number is not None and number:
            self.factor *= 1.0 / number if divides else number
            return logits
        own, shape = shape_of(by) if isinstance(by, fx.Node) else None, shape_of(node) or ()
        single = math.prod(own or ()) == 1
        by_query = own is not None and own[-1:] == (1,) and len(own) <= len(shape) and self.order is None
        if not isinstance(by, fx.Node) or self.others or not (single or by_query):
            return None
        self.factors.append(Factor(by, divides, () if own is None else shape))
        return logits

    def _masks(self, kind: str, mask: Any, value: Any, logits: fx.Node) -> bool:
        number = self._number(value)
        if not isinstance(mask, fx.Node) or number is None or number * self.factor > BLOCKING:
            return False
        return example(mask).dtype == torch.bool and self._term(kind, mask, number * self.factor, logits)

    def _beside(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
        """Sinks: further columns, after the tokens'."""
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if len(parts) != 2 or dim not in (-1, len(shape) - 1) or self.terms or self.softcap or self.order:
            return None
        if self.factor != 1.0 or self.factors:
            return None
        logits, self.sinks = parts
        self.sinks_shape = shape_of(logits) or ()
        self.shapes.clear()
        return logits if isinstance(logits, fx.Node) else None

    def _number(self, value: Any) -> float | None:
        """A number, also if it is a constant tensor that the graph makes and leaves as it is."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, fx.Node) or self.flow.writes(value):
            return None
        if value.target in (torch.tensor, torch.full) and shape_of(value) in ((), (1,)):
            held: Any = value.args[-1] if value.target is torch.full else value.args[0]
            while isinstance(held, (list, tuple)) and held:
                held = held[0]
            return float(held) if isinstance(held, (int, float)) else None
        if name_of(value) == "full_like":
            return self._number(value.args[1] if len(value.args) > 1 else value.kwargs.get("fill_value"))
        return self._number(value.args[0]) if name_of(value) in CASTS else None

    @staticmethod
    def _is_logits(node: Any, shape: tuple[int, ...]) -> bool:
        return isinstance(node, fx.Node) and shape_of(node) == shape

    @staticmethod
    def _is_maximum(node: Any, of: Any) -> bool:
        """The largest of the last axis, kept: taking it off all logits changes no softmax."""
        if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if name_of(node) not in ("max", "amax") or not node.args or node.args[0] is not of:
            return False
        given: list[Any] = [*node.args[1:], *node.kwargs.values()]
        return True in given and any(g is not True and g in (-1, len(shape_of(of) or ()) - 1) for g in given)


def _named(node: fx.Node) -> fx.Node:
    """What a write in place, or one upon it, changes: the node that the graph calls so."""
    written = mutated_argument(node)
    while written is not None:
        node, written = written, mutated_argument(written)
    return node


def read(softmax: fx.Node, links: list[fx.Node], output: fx.Node, flow: DataFlow) -> Chain:
    """The chain of a softmax whose weights reach the product `output` through `links`.

    Raises:
        Refusal: a link is not known.
    """
    source = softmax_input(softmax)
    last = product_of(output)
    if source is None or last is None:
        raise refusal("its softmax is not over the last axis, or its product with the values is not known")
    reader = _Reader(flow)
    scores = reader.up(source, softmax)
    if scores is None:
        raise refusal(reader.stopped)
    order: tuple[int, ...] | None = None
    cut = False
    for link in links[1:]:
        name = name_of(link)
        if "dropout" in name and not _is_idle(link):
            raise Refusal("dropout", f"{link.format_node()} drops weights", "call model.eval()")
        if link.target is operator.getitem and not cut:
            cut = _cuts_sinks(link, reader)
            if not cut:
                raise refusal(f"{link.name} takes a part of the weights")
        elif name in REGROUPS and (shape_of(link) or ())[-1:] != (shape_of(link.args[0]) or ())[-1:]:  # type: ignore[arg-type]
            raise refusal(f"{link.name} regroups the context")
        elif is_pointwise(link) and name not in CASTS:
            raise refusal(f"{name} changes the weights")
        elif order_of(link) is not None:
            if order is not None:
                raise refusal(f"{link.name} permutes the weights twice")
            order = order_of(link)
        elif order is not None and name in REGROUPS:
            raise refusal(f"{link.name} regroups permuted weights")
    if (reader.sinks is not None) != cut:
        raise refusal("columns beside the logits, which are not cut off after the softmax")
    for link in (*reader.links, *links):
        strange = [w for w in flow.writes(link) if w not in reader.links and flow.origin(link).op != "placeholder"]
        if any(flow.order[w] < flow.order[output] for w in strange):
            raise refusal(f"{strange[0].name} changes it in place")
    scale = reader.factor * scores.factor
    if not scale:
        raise refusal("its scale is zero")
    return Chain(
        scores=scores,
        others=tuple(reader.others),
        order=reader.order,
        scale=scale,
        factors=tuple(reader.factors),
        softcap=reader.softcap,
        terms=tuple(reader.terms),
        sinks=reader.sinks,
        sinks_shape=reader.sinks_shape,
        shapes=tuple(reader.shapes),
        weights=links[-1],
        weights_order=order,
        output=last,
        links=(*reversed(reader.links), *links, output),
        forgives=any(name_of(link) == "nan_to_num" for link in links),
    )


def _is_idle(dropout: fx.Node) -> bool:
    given: dict[str, Any] = dict(zip(("input", "p", "training"), dropout.args, strict=False)) | dict(dropout.kwargs)
    return given.get("p") == 0 or given.get("training", True) is False


def _cuts_sinks(link: fx.Node, reader: _Reader) -> bool:
    """`weights[..., :-C]`, which leaves the tokens'."""
    wanted = reader.sinks_shape
    index: Any = link.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    last = items.pop()
    whole = all(item is Ellipsis or item == slice(None) for item in items)
    begins = isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
    return whole and begins and bool(wanted) and (shape_of(link) or ())[-1] == wanted[-1]
