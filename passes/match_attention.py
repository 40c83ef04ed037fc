"""match: which attention of a decode graph becomes a site, and why any other must stay dense. Analysis only.

General rules of data flow, no model names: attention whose keys and values come, position by position, from a graph
input that this step writes its own tokens into, under a mask that can be evaluated at single positions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import fx

from sfi_compile.compat.dynamo import example, module_path
from sfi_compile.passes import paths
from sfi_compile.passes.base import MOST_QUERIES, Pass, Refusal, Work
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.reads import cache_read, check_position, checked_mask
from sfi_compile.passes.shapes import shape_of
from sfi_compile.passes.uncovered import uncovered
from sfi_compile.site import Form, Guard, MatchResult, Rejection, Site


@dataclasses.dataclass(frozen=True)
class MatchAttention(Pass):
    """Frozen Site records, Rejections, and the Guard that all sites share."""

    name: ClassVar[str] = "match"

    def apply(self, work: Work) -> Work:
        """Fill in `work.match`."""
        return dataclasses.replace(work, match=match(work.graph.graph, work.forms))


def match(graph: fx.Graph, forms: tuple[Form | Rejection, ...]) -> MatchResult:
    """All sites and rejections of a graph, in program order."""
    flow = DataFlow(graph)
    sites: list[Site] = []
    rejections: list[Rejection] = []
    for form in forms:
        if isinstance(form, Rejection):
            rejections.append(form)
            continue
        try:
            site = _site(form, flow)
        except Refusal as refusal:
            rejections.append(refusal.at(module_path(form.original)))
            continue
        if site is not None:
            sites.append(site)
    sites, others = _alike(sites, graph, flow)
    for site in others:
        explanation = f"{site.batch} rows of {site.query_len} new tokens, beside sites of {sites[0].batch} rows"
        hint = "give keys and values a batch axis"
        rejections.append(Rejection("rows", site.module, explanation, hint))
    rejections += uncovered(graph, flow, sites, rejections)
    guard = _guard(sites, forms, graph, flow) if sites else None
    return MatchResult(tuple(sites), tuple(rejections), guard)


def _alike(sites: list[Site], graph: fx.Graph, flow: DataFlow) -> tuple[list[Site], list[Site]]:
    """The sites that have as many rows and new tokens as the tokens fed, or else as most sites; and the others."""
    counts = Counter((site.batch, site.query_len) for site in sites).most_common()
    rows = next((c for c, _ in counts if _tokens(graph, flow, *c) is not None), counts[0][0] if counts else None)
    kept = [site for site in sites if (site.batch, site.query_len) == rows]
    return kept, [site for site in sites if site not in kept]


def _site(form: Form, flow: DataFlow) -> Site | None:
    arguments: Any = (*form.node.args, *(0.0, None, None)[len(form.node.args) - 5 :])
    query, key, value, mask, scale, softcap, sinks, fill = arguments
    batch, query_heads, query_len, key_dim = shape_of(query) or ()
    _, kv_heads, context, _ = shape_of(key) or ()
    if query_len > MOST_QUERIES:
        raise Refusal("query-length", f"{query_len} new tokens in one step", f"feed at most {MOST_QUERIES} a step")
    if context == query_len and not paths.is_cached(paths.path(key, 2, flow), flow):
        return None  # a short prompt over its own tokens
    keys = cache_read(key, "keys", form.node, flow)
    values = cache_read(value, "values", form.node, flow)
    if keys is None or values is None:
        return None  # the cache is made in this step, which is a prompt of one token
    writes = tuple({w.node: w for w in (*keys.writes, *values.writes)}.values())
    for write in writes:
        check_position(write, flow)
        if write.count != query_len:
            explanation = f"{write.node.name} writes {write.count} positions for {query_len} queries"
            raise Refusal("cache-write", explanation, "write the step's own tokens")
    traced = checked_mask(mask, (batch, query_heads, query_len, context), form.node, flow)
    tensor = example(key)
    return Site(
        module=module_path(form.original),
        form=form,
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        fill=fill,
        writes=writes,
        batch=batch,
        query_heads=query_heads,
        kv_heads=kv_heads,
        query_len=query_len,
        key_dim=key_dim,
        value_dim=(shape_of(value) or ())[3],
        context=context,
        dtype=tensor.dtype,
        device=tensor.device,
        constants=tuple(dict.fromkeys((*keys.constants, *values.constants))),
        context_sources=(*keys.sources, *values.sources, *traced.sources),
        kept=traced.kept,
    )


def _guard(sites: list[Site], forms: tuple[Form | Rejection, ...], graph: fx.Graph, flow: DataFlow) -> Guard:
    attention = {f.original for f in forms if isinstance(f, Form)}
    last, telling = sites[-1], False
    for site in reversed(sites):
        if not attention.isdisjoint(flow.slice_of(site.writes[0].value)):
            last, telling = site, True
            break
    positions = dict.fromkeys(w.index for site in sites for w in site.writes)
    return Guard(tuple(positions), _tokens(graph, flow, last.batch, last.query_len), last.writes[0], telling)


def _tokens(graph: fx.Graph, flow: DataFlow, batch: int, query_len: int) -> fx.Node | None:
    """The token ids: the integer input [batch, query_len] that is looked up in a table as long as an output is wide.

    Positions and token types may be looked up, too. If no output (the logits) has the length of a table, the largest is
    the tokens'.
    """
    output = next(n for n in graph.nodes if n.op == "output")
    widths = {shape[-1] for n in output.all_input_nodes if (shape := shape_of(n))}
    found: dict[fx.Node, tuple[bool, int]] = {}
    for node in graph.nodes:
        if node.target is torch.nn.functional.embedding and isinstance(node.args[0], fx.Node):
            weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
            ids, table = flow.origin(node.args[0]), shape_of(weight) if isinstance(weight, fx.Node) else None
            if ids.op == "placeholder" and shape_of(ids) == (batch, query_len) and table is not None:
                key = (table[0] in widths, table[0])
                found[ids] = max(key, found.get(ids, key))
    return max(found, key=found.__getitem__, default=None)
