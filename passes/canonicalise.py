"""canonicalise: every way of writing attention gets its one form, `sfi::attention`, beside it.

Scaled-dot-product attention, softmax chains and flex attention become nodes that say the same: queries, keys and values
before any head repetition, one mask, a scale, a softcap, sinks. The graph's own nodes stay, and nothing reads the new
ones; for a site that is rewritten, `insert_guards` puts the new node in the place of the old. No model names.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import copy_graph_module, example, module_path
from sfi_compile.passes import assemble, chains, flex, links, paths
from sfi_compile.passes.assemble import Assembler
from sfi_compile.passes.base import Pass, Refusal, Work
from sfi_compile.passes.dataflow import DataFlow, live_nodes
from sfi_compile.passes.products import Operand, is_product, product_of
from sfi_compile.passes.shapes import shape_of
from sfi_compile.site import Form, Rejection

_SDPA = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
_OPAQUE = {
    "multi_head_attention_forward": "nn.MultiheadAttention",
    "_native_multi_head_attention": "nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "nn.TransformerEncoderLayer",
}


@dataclasses.dataclass(frozen=True)
class Canonicalise(Pass):
    """Adds nodes to a private copy of the graph, and records the forms found and refused in `work.forms`."""

    name: ClassVar[str] = "canonicalise"

    def apply(self, work: Work) -> Work:
        """The graph with a canonical node for every attention that has one."""
        module = copy_graph_module(work.graph)
        finder = _Finder(module)
        forms: list[Form | Rejection] = []
        live = live_nodes(module.graph)
        for node in [n for n in module.graph.nodes if n in live]:
            try:
                form = finder.form(node)
            except Refusal as refusal:
                forms.append(refusal.at(module_path(node)))
                continue
            if form is not None:
                forms.append(form)
        forms += finder.loose()
        module.graph.lint()
        module.recompile()
        return dataclasses.replace(work, graph=module, forms=tuple(forms), queries=tuple(finder.queries))


class _Finder:
    """Looks at the nodes of one graph in program order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.flow = DataFlow(module.graph)
        self.builder = Assembler(module.graph, self.flow)
        self.results: set[fx.Node] = set()
        """What attention computes: a walk upwards from a later layer ends there."""
        self.queries: list[Any] = []
        self.open: set[fx.Node] = set()
        """Scores over a cache that go into a softmax, of which no product with values was seen."""
        self.vmaps = 0
        """How many of them a node is inside of."""
        self.unread: list[fx.Node] = []
        """Softmaxes that are not known to be part of attention."""

    def form(self, node: fx.Node) -> Form | None:
        """The canonical form of the attention whose decisive node is `node`, if it is one."""
        name = getattr(node.target, "__name__", "")
        self.vmaps += {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}.get(name, 0)
        if self.vmaps and (links.is_softmax(node) or is_product(node)):
            # Its values stand for one of many, and are none that a graph could be built from.
            if links.is_softmax(node) and self._reads_cache(node):
                raise Refusal("nested-graph", "attention is inside torch.vmap", "call attention outside")
            return None
        if node.op == "call_function" and node.target in _SDPA:
            self._seen(node, node.args[0] if node.args else node.kwargs.get("query"))
            return self._sdpa(node)
        if node.op == "call_function" and name in _OPAQUE:
            raise Refusal(
                "opaque-module", f"{_OPAQUE[name]} hides its attention in one call", "write attention with sdpa"
            )
        if name == "flex_attention":
            self._seen(node, node.args[0])
            return flex.form(node, self.module, self.builder)
        if links.is_softmax(node):
            return self._softmax(node)
        if is_product(node):
            self._refuse_loose(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator) and self._holds_attention(node):
            raise Refusal(
                "nested-graph", f"attention is inside a graph of its own, of {name}", "call attention outside"
            )
        return None

    def _reads_cache(self, node: fx.Node) -> bool:
        """Whether a value depends on an input that this step writes, other than through attention seen before."""
        frontier, seen = [node], {node}
        while frontier:
            current = frontier.pop()
            if current.op == "placeholder" and self.flow.writes(current):
                return True
            more = [n for n in current.all_input_nodes if n not in seen and n not in self.results]
            seen.update(more)
            frontier += more
        return False

    def _seen(self, result: fx.Node, queries: Any) -> None:
        self.results.add(result)
        value = example(queries) if isinstance(queries, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            self.queries.append(value.shape[-2])

    def _seen_below(self, softmax: fx.Node, output: fx.Node) -> None:
        found = links.reduced(softmax)
        if found is None or found[1] == len(shape_of(found[0]) or ()) - 1:
            self._seen(output, softmax.all_input_nodes[0])
            return
        # Which of the other axes is the queries' does not show; the step feeds as many as it writes.
        tokens = paths.context(*found, self.flow)
        self.results.add(output)
        self.queries += [tokens] if tokens else []

    def _refuse_loose(self, node: fx.Node) -> None:
        """A product of queries and cached keys whose softmax is nowhere to be seen."""
        product = product_of(node)
        fate = links.fate(node)
        if product is None or node in self.results or not fate:
            return
        for factor, other in ((product.left, product.right), (product.right, product.left)):
            columns = [i for i, n in enumerate(factor.letters) if n not in other.letters]
            if not any(paths.is_written_along(factor.node, axis, self.flow) for axis in columns):
                continue
            if fate == "softmax":
                self.open.add(node)
                return
            if fate == "output":
                hint = "see TORCH_LOGS=graph_breaks; keep attention in one graph"
                raise Refusal("split-attention", f"{node.name} leaves the graph before its softmax", hint)
            raise chains.refusal(f"no softmax between {node.name} and the values")

    def loose(self) -> list[Rejection]:
        """Attention over a cache of which, at the end, no form is known and nothing was said."""
        lacks_product = chains.refusal("its weights are not multiplied with the values by a product")
        found = [lacks_product.at(module_path(node)) for node in self.flow.nodes if node in self.open]
        for softmax in self.unread:
            source, axis = links.reduced(softmax) or (softmax, -1)
            tokens = paths.context(source, axis, self.flow) if axis >= 0 else None
            if tokens is None or links.products_above([source]) & self.open:
                continue
            self.queries += [tokens] if tokens else []
            unknown = chains.refusal(f"{softmax.name} is over the tokens of a cache, and not between two products")
            found.append(unknown.at(module_path(softmax)))
        return found

    def _holds_attention(self, node: fx.Node) -> bool:
        """Whether a graph that a node runs (of a checkpoint, a cond) has an attention node, or softmax and products
        and reads a cache that this step writes."""
        known = dict(self.module.named_modules())
        inner = [known.get(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        nodes = [n for m in inner if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
        written_out = any(map(links.is_softmax, nodes)) and sum(map(is_product, nodes)) > 1
        cached = any(self.flow.writes(n) for n in node.all_input_nodes)
        return any(n.target in _SDPA for n in nodes) or (written_out and cached)

    def _sdpa(self, node: fx.Node) -> Form | None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
        shapes = [shape_of(n) if isinstance(n, fx.Node) else None for n in (query, key, value)]
        if any(s is None or len(s) != 4 for s in shapes):
            raise Refusal("rank", f"query, key, value have shapes {', '.join(map(str, shapes))}", "use 4-D heads")
        if given.get("dropout_p"):
            raise Refusal("dropout", f"dropout_p is {given['dropout_p']}", "call model.eval()")
        if given.get("is_causal"):
            if not self._from_cache(key, 2):
                return None  # a prompt, over its own tokens
            raise Refusal("is-causal", "is_causal=True lets the first query see one key", "pass attn_mask instead")
        with self.module.graph.inserting_before(node):
            scale = (shapes[0] or ())[-1] ** -0.5 if given.get("scale") is None else given["scale"]
            if not isinstance(scale, (int, float)):
                query, scale = assemble.scaled(self.builder, query, scale), 1.0
            context, device = (shapes[1] or ())[2], example(key).device
            if mask is None:
                mask = assemble.everything(self.builder, context, device)
            mask = assemble.four_axes(self.builder, mask)
            if (shape_of(mask) or ())[3:] == (1,):
                mask = assemble.over_context(self.builder, mask, context, device)
            tensors = (query, key, value, mask)
            result, repeats = assemble.finished(self.builder, node, tensors, float(scale))
        return Form("sdpa", result, result, node, repeats)

    def _softmax(self, softmax: fx.Node) -> Form | None:
        """Attention, if the weights are multiplied with values over a cache."""
        for path, output in links.products_below(softmax):
            product = product_of(output)
            if product is None:
                if not self._reaches_cache(output):
                    continue
                self.open -= links.products_above(softmax.all_input_nodes)
                raise chains.refusal(f"{output.name} is not known")
            values = [f for f in (product.left, product.right) if f.node is not path[-1]]
            over_cache = [f for f in values if self._from_cache(f.node, f.letters.find(product.contracted))]
            if over_cache:
                self._seen_below(softmax, output)
                self.open -= links.products_above(softmax.all_input_nodes)
                return self._chain(softmax, path, output, over_cache[0], product.contracted)
            self._refuse_given(softmax, output, values, product.contracted)
        self.unread.append(softmax)
        return None  # of experts, of samples, of this step's own tokens

    def _refuse_given(self, softmax: fx.Node, output: fx.Node, values: list[Operand], contracted: str) -> None:
        """Cross-attention: keys and values are inputs that this step writes nothing into."""
        source = links.softmax_input(softmax)
        shape = shape_of(source) or () if source is not None else ()
        if source is None or len(shape) < 2 or shape[-1] == shape[-2]:  # a token's own attention to its step
            return
        products = [p for p in map(product_of, links.products_above([source])) if p is not None]
        factors = [(f, other) for p in products for f, other in ((p.left, p.right), (p.right, p.left))]
        keys = {f.node: i for f, other in factors for i, n in enumerate(f.letters) if n not in other.letters}
        given = [names for node, axis in keys.items() if (names := paths.is_given(node, axis, self.flow))]
        for value in values:
            names = paths.is_given(value.node, value.letters.find(contracted), self.flow)
            if names and given:
                self._seen(output, source)
                explanation = f"this step writes nothing into {', '.join(dict.fromkeys((*given[0], *names)))}"
                raise Refusal(
                    "no-cache-write", explanation, "nothing for cross-attention; else write into the cache in place"
                )

    def _chain(self, softmax: fx.Node, path: list[fx.Node], output: fx.Node, values: Operand, contracted: str) -> Form:
        found = chains.read(softmax, path, output, self.flow)
        outside = links.escapes(found.links, output)
        if outside is not None:
            explanation = f"attention written out: its weights are also used by {outside.name}"
            raise Refusal("weights-used", explanation, "do not ask for attention weights (output_attentions=False)")
        products = [found.scores, *(product for product, _ in found.others)]
        operands = [values.node, *(f.node for p in products for f in (p.left, p.right))]
        others = (*(term.node for term in found.terms), *(factor.node for factor in found.factors), found.sinks)
        operands += [n for n in others if n is not None]
        first = min(self.flow.order[p.node] for p in products)
        for operand in operands:
            for write in self.flow.writes(operand):
                if first < self.flow.order[write] < self.flow.order[output]:
                    raise Refusal("stale-read", f"{write.name} comes between scores and output", "write first")
        with self.module.graph.inserting_before(output):
            axis = values.letters.find(contracted)
            new_tokens = paths.new_tokens(paths.path(values.node, axis, self.flow), self.flow)
            node, result, repeats = assemble.chain(self.builder, found, new_tokens)
            if example(result).dtype != example(output).dtype:
                result = self.builder.method("to", result, example(output).dtype)
        return Form("softmax chain", node, result, output, repeats)

    def _from_cache(self, node: fx.Node, axis: int) -> bool:
        """Whether axis `axis` of a value comes from a cache: an input that this step writes into, or makes longer."""
        if axis < 0:
            return False
        path = paths.path(node, axis, self.flow)
        known = path.blocked is None or path.blocked.grows
        return paths.is_cached(path, self.flow) if known else self._reaches_cache(node)

    def _reaches_cache(self, node: fx.Node) -> bool:
        """Whether a value depends on a written input of three axes or more, other than through attention."""
        frontier, seen = [node], {node}
        while frontier:
            current = frontier.pop()
            if current.op == "placeholder" and self.flow.writes(current) and len(shape_of(current) or ()) >= 3:
                return True
            new = [n for n in current.all_input_nodes if n not in seen and current not in self.results]
            seen.update(new)
            frontier += new
        return False
