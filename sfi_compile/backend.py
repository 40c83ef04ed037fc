"""`torch.compile(model, backend="sfi")`: the whole story on one page.

Dynamo hands over a graph. If it is a decode step whose attention sites can be rewritten, it leaves as a slow graph and
a fast graph behind one guard; otherwise it is compiled as `backend="inductor"` would.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from sfi_compile import diagnostics
from sfi_compile.compat.dynamo import example, has_symbols, is_last_recompilation, needs_gradients
from sfi_compile.compat.inductor import COMBINED, compile_graph, mode_patches, without_collector
from sfi_compile.config import Config, within
from sfi_compile.cost_model import CostModel, SiteShape
from sfi_compile.diagnostics import DenseGraph
from sfi_compile.guard import GuardInputs
from sfi_compile.passes import pipeline
from sfi_compile.passes.ahead import kernels_compiled
from sfi_compile.passes.base import ContextSizedError, VerificationError, Work
from sfi_compile.passes.dataflow import DataFlow, alike, extract
from sfi_compile.runtime import DecodeRunner
from sfi_compile.site import CacheWrite, MatchResult, RejectedSitesError, Rejection, Site

log = logging.getLogger("sfi_compile")

_GRADIENTS = Rejection(
    "gradients", "graph", "gradients are enabled, so the graph is compiled by plain Inductor", "use torch.no_grad()"
)


def sfi(gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """The Dynamo backend; `settings` are `options=` and `mode=` of `torch.compile`.

    Raises:
        OptionError: a bad option.
        ValueError: a bad mode.
        RejectedSitesError: `strict=True` and a decode graph with a site that must stay dense.
    """
    config = Config.from_options(settings.get("options"))
    patches = mode_patches(settings.get("mode") or config.mode)
    if is_last_recompilation():
        log.warning(
            "sfi: Dynamo compiles this function for the last time; with other sizes it will run without a compiler. "
            "Layers compiled one by one, and models of transformers compiled by model.compile, share one limit: use "
            "sfi_compile.accelerate(model). Give every cache one length (max_cache_len), positions as tensors, "
            "or raise torch._dynamo.config.recompile_limit"
        )
    survey = pipeline.run(pipeline.SURVEY, Work(config, gm))
    if survey.is_prompt:
        _report(survey.symbolic_step, config)
        return _left_dense(compile_graph(gm, example_inputs, patches), survey.symbolic_step)
    if needs_gradients(example_inputs):
        found: tuple[Rejection, ...] = (_GRADIENTS,) if survey.matched.sites or survey.matched.rejections else ()
        _report(found, config)
        return _left_dense(compile_graph(gm, example_inputs, patches), found)

    work = analyse(gm, survey)
    _report(work.matched.rejections, config)
    guard = work.matched.guard
    if guard is not None and guard.tokens is None and config.boundary_token_ids:
        log.warning("sfi: the graph looks up no token ids [batch, new tokens], so boundary_token_ids cannot trigger")
    if guard is None and not work.matched.rejections:
        log.info("sfi: a graph without attention is compiled by plain Inductor")
    if not work.pays:
        return _left_dense(compile_graph(gm, example_inputs, patches), work.matched.rejections)

    with without_collector():
        return _compiled(work, gm, example_inputs, patches)


def _compiled(
    work: Work, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Rewrite an analysed graph and compile both of its variants; or the graph as it is, if it cannot be rewritten."""
    reads = _guard_inputs(work.matched, work.graph)
    try:
        work = pipeline.run(pipeline.REWRITE, work, first_stage=len(pipeline.ANALYSIS))
    except ContextSizedError as error:
        hint = "compute masks from positions, or pass them to the model"
        found = (*work.matched.rejections, Rejection("context-work", "graph", str(error), hint))
        _report(found, work.config)
        return _left_dense(compile_graph(gm, example_inputs, patches), found)
    inputs = [*example_inputs, *work.added]
    if work.config.combo_kernels and any(s.device.type == "cuda" for s in work.state):
        patches = {**COMBINED, **patches}
    with kernels_compiled(work):
        slow, fast = (compile_graph(module, inputs, patches, pipeline.cache_key()) for module in work.variants)
    diagnostics.counters.graphs += 1
    state = {s.name: s.allocate() for s in work.state}
    runner = DecodeRunner(slow, fast, reads, state, work.config, work.min_context or 0, len(work.matched.sites))
    diagnostics.rejected[runner] = work.matched.rejections
    return runner


def analyse(gm: fx.GraphModule, survey: Work) -> Work:
    """Match a graph and find the context from which a memory pays. Changes nothing."""
    config = survey.config
    if not survey.matched.sites:
        return survey  # before any size is pinned: what stays dense may stay dynamic
    # Without symbolic numbers there is nothing to pin, and the survey has said it all.
    work = pipeline.run(pipeline.ANALYSIS, Work(config, gm)) if has_symbols(gm.graph) else survey
    sites = work.matched.sites
    config = within(config, max(s.context for s in sites))
    work = dataclasses.replace(work, config=config)
    cost = CostModel.of([_shape(s) for s in sites], config)
    allocated = min(s.context for s in sites)
    if cost.threshold is not None and cost.threshold <= allocated:
        return dataclasses.replace(work, cost=cost, min_context=cost.threshold)
    needs = "never" if cost.threshold is None else f"from {cost.threshold} tokens"
    short = Rejection(
        "context-too-short",
        "graph",
        f"the cache holds {allocated} positions and a memory pays {needs}",
        "raise max_cache_len, lower k_head and recent, or set min_context (0: always use the memory)",
    )
    match = dataclasses.replace(work.matched, rejections=(*work.matched.rejections, short))
    return dataclasses.replace(work, cost=cost, match=match)


def _shape(site: Site) -> SiteShape:
    return SiteShape(
        batch=site.batch,
        query_heads=site.query_heads,
        kv_heads=site.kv_heads,
        key_dim=site.key_dim,
        value_dim=site.value_dim,
        query_len=site.query_len,
        context=site.context,
        itemsize=site.dtype.itemsize,
        repeats_heads=site.form.repeats_heads,
        masked=True,
    )


def _report(rejections: tuple[Rejection, ...], config: Config) -> None:
    """One log line per rejection that is new; an error with `strict=True`."""
    if rejections and config.strict:
        raise RejectedSitesError(rejections)
    known = diagnostics.rejections()
    for rejection in dict.fromkeys(rejections):
        if rejection not in known:
            log.warning("sfi: left dense: %s", rejection)


def _left_dense(call: Callable[..., Any], rejections: tuple[Rejection, ...]) -> Callable[..., Any]:
    """The graph as plain Inductor compiled it; `stats()` tells why for as long as it lives."""
    if not rejections:
        return call
    graph = DenseGraph(call)
    diagnostics.rejected[graph] = rejections
    return graph


def _guard_inputs(match: MatchResult, module: fx.GraphModule) -> GuardInputs:
    """Where the runtime finds position, tokens and fingerprint among the graph's inputs."""
    guard = match.guard
    if guard is None:
        raise VerificationError("sites without a guard")
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    fixed = [n for n in guard.positions if isinstance(n, int)]
    groups = alike(DataFlow(module.graph), [n for n in guard.positions if not isinstance(n, int)])
    positions, used = extract(module, [group[0][0] for group in groups])
    writes = [w for site in match.sites for w in site.writes]
    constants = dict.fromkeys(n for site in match.sites for n in site.constants)
    watched = {*(w.root for w in writes), *constants}
    lengths = [_shortest(writes, {n for n, _ in group}) for group in groups] + [_shortest(writes, {n}) for n in fixed]
    return GuardInputs(
        positions=positions,
        position_arguments=tuple(inputs.index(n) for n in used),
        fixed_positions=tuple(fixed),
        counters=tuple(tuple(inputs.index(n) for _, n in group) for group in groups if len(group) > 1),
        tokens=None if guard.tokens is None else inputs.index(guard.tokens),
        lengths=tuple(lengths),
        watched=tuple(sorted(inputs.index(n) for n in watched)),
        identical=tuple(inputs.index(n) for n in (*constants, *(() if guard.telling else (guard.write.root,)))),
        telling=guard.telling,
        root=inputs.index(guard.write.root),
        axis=guard.write.axis,
        batch=match.sites[-1].batch,
        batch_axis=guard.write.batch_axis,
        queries=guard.write.count,
    )


def _shortest(writes: list[CacheWrite], positions: set[Any]) -> int:
    """Length of the shortest cache that is written at one of these positions."""
    return min(int(example(w.root).shape[w.axis]) for w in writes if w.index in positions)
