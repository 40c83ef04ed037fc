"""`explain`: what the compiler would do with one decode step of a model, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from sfi_compile.backend import analyse
from sfi_compile.compat.dynamo import trace_once
from sfi_compile.config import Config
from sfi_compile.diagnostics import Report, site_rows
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from sfi_compile.site import Rejection

_NO_ATTENTION = Rejection(
    "no-attention",
    "graph",
    "no attention over a cache that was there before the step",
    "fill the cache first, and pass one token a row",
)


def explain(model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Trace `model(*args, **kwargs)`, one decode step, and report its sites and rejections. Nothing is executed.

    Args:
        model: a module or a function; for a module its `forward` is traced, also if it has been compiled.
        *args: what one decode step takes (one new token a row, and the filled cache).
        options: what would be passed to `torch.compile(..., options=...)`.
        **kwargs: likewise.

    Raises:
        OptionError: a bad option.
    """
    config = Config.from_options(options)
    function = getattr(model, "forward", model)
    found: list[Report] = []

    def inspect(gm: fx.GraphModule) -> None:
        survey = pipeline.run(pipeline.SURVEY, Work(config, gm))
        if survey.is_prompt:
            several = Rejection("query-length", "graph", "the step has many new tokens", "feed one token per row")
            found.append(Report((), survey.symbolic_step or (several,), None, None))
            return
        work = analyse(gm, survey)
        if not work.matched.sites and not work.matched.rejections:
            found.append(Report((), (_NO_ATTENTION,), None, None))
            return
        tokens = work.matched.guard.tokens if work.matched.guard is not None else None
        name = None if tokens is None else tokens.name
        found.append(Report(site_rows(work.matched.sites), work.matched.rejections, work.cost, name))

    with torch.no_grad():
        broken = trace_once(function, args, kwargs, inspect)
    if broken is not None:
        graph_break = Rejection("graph-break", "graph", broken, "see TORCH_LOGS=graph_breaks; each piece decides alone")
        rejections = (graph_break, *(r for report in found for r in report.rejections if r is not _NO_ATTENTION))
        sites = tuple(s for report in found for s in report.sites)
        return Report(sites, rejections, found[0].cost if found else None, None)
    return found[0]
