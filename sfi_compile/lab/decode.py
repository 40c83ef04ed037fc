"""One decode loop for everything in the lab: prefill, timed steps, and what each step was, read from the counters.

Imports the package's public names, `compat.dynamo`, `diagnostics`, `lab.errors` and `lab.models`.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import sfi_compile
from sfi_compile.compat.dynamo import BackendCompilerFailed, compiled_graphs
from sfi_compile.diagnostics import runners
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import cache_keyword

PREFILL_CHUNK = 256
"""Prompt tokens per eager prefill call: bounds the [chunk, context] mask and score tensors."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One timed decode step."""

    seconds: float
    kind: str
    """"slow" or "fast" by the backend's own counters; "dense" if neither moved."""
    compiled: bool
    """Compilation happened in it (or may have: the first step of its kind), so it is no timing."""
    processor_seconds: float = 0.0
    """Processor time that this process got meanwhile, over all its threads."""


class Decoder:
    """A compiled model on one static cache, stepped one or a few tokens at a time; `steps` records every step.

    Args:
        model: causal decoder with `forward(input_ids, cache=…)`.
        cache: its static cache, already filled by `prefill` (or by hand).
        backend: "inductor" (the dense reference), "sfi", or a function.
        options: options of `backend="sfi"`.
        mode: Inductor mode, with the other backends.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        backend: str | Callable[..., Any],
        options: dict[str, Any] | None = None,
        mode: str | None = None,
    ) -> None:
        self.steps: list[Step] = []
        self._call: Any = torch.compile(model, backend=backend, dynamic=False, options=options, mode=mode)
        self._keywords = {cache_keyword(model): cache, "use_cache": True}
        self._counted = backend == "sfi"
        if self._counted:
            sfi_compile.reset()
        earlier = sfi_compile.stats()
        self._earlier = earlier.sites, earlier.memory_bytes

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed int64 tokens [batch, 1 to 8]; returns the logits [batch, vocab] of the next token.

        Raises:
            LabError: `strict=True` and a site was rejected.
        """
        # A view of a longer prompt has other strides than a fresh [batch, 1] tensor, which would compile a second time.
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        before, graphs = sfi_compile.stats() if self._counted else None, compiled_graphs()
        synchronize(tokens.device)
        start, processor = time.perf_counter(), time.process_time()
        try:
            with torch.no_grad():
                logits = self._call(tokens, **self._keywords).logits
        except (sfi_compile.RejectedSitesError, BackendCompilerFailed) as error:
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, (sfi_compile.RejectedSitesError, sfi_compile.OptionError)):
                raise LabError(str(inner).removeprefix("sfi: ")) from None
            raise
        synchronize(tokens.device)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        kind, recompiled = "dense", compiled_graphs() != graphs
        if before is not None:
            after = sfi_compile.stats()
            recompiled = recompiled or after.graphs != before.graphs
            if after.slow_steps > before.slow_steps:
                kind = "slow"
            elif after.fast_steps > before.fast_steps:
                kind = "fast"
        first = all(step.kind != kind for step in self.steps)
        self.steps.append(Step(seconds, kind, first or recompiled, processor))
        return logits[:, -1]  # type: ignore[no-any-return]

    def timed(self, kind: str | None = None) -> list[float]:
        """Seconds of the steps of a kind (all kinds: None) in which nothing was compiled."""
        return [step.seconds for step in self.steps if not step.compiled and kind in (None, step.kind)]

    def sites(self) -> int:
        """Attention sites rewritten for this model; other models of the process do not count."""
        return sfi_compile.stats().sites - self._earlier[0]

    def memory_bytes(self) -> int:
        """Bytes of packed memory and other state of this model."""
        return sfi_compile.stats().memory_bytes - self._earlier[1]

    def supports(self) -> tuple[list[int | None], list[torch.Tensor]] | None:
        """What the memories hold, as `DecodeRunner.supports` says, of the one graph in this process that may go on.

        None where there is none (rows of the cache stand at different positions) or are several (a model compiled in
        pieces, another model that ran since `sfi_compile.reset`).
        """
        ran = [runner for runner in runners if runner.next_position is not None]
        return ran[0].supports() if len(ran) == 1 else None

    def processor_share(self) -> float | None:
        """Processors that this process kept busy in its timed steps; well below 1 on a CPU, others were using them."""
        timed = [step for step in self.steps if not step.compiled]
        wall = sum(step.seconds for step in timed)
        return sum(step.processor_seconds for step in timed) / wall if wall else None

    def compile_seconds(self) -> float:
        """Seconds spent compiling: the steps that compiled, less what a later step of the same kind takes."""
        total = 0.0
        for step in self.steps:
            if step.compiled:
                total += step.seconds - (median(self.timed(step.kind)) or 0.0)
        return max(total, 0.0)


def forget_graphs() -> None:
    """Drop every compiled graph, so that those of an earlier run are neither counted nor add to recompile limits."""
    torch.compiler.reset()
    gc.collect()


def prefill(model: Any, ids: torch.Tensor, cache: Any, progress: Callable[[int], None] = lambda tokens: None) -> None:
    """Run prompt tokens, int64 [batch, tokens], through the model in eager mode, in chunks; the cache keeps them.

    `progress` is called with the number of tokens of each chunk done.
    """
    keywords = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        for chunk in torch.split(ids, PREFILL_CHUNK, dim=1):
            model(chunk, **keywords)
            progress(chunk.shape[1])


def median(seconds: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(seconds) if seconds else None


def interquartile_range(seconds: Sequence[float]) -> float | None:
    """Distance between the quartiles, None of fewer than two values."""
    if len(seconds) < 2:
        return None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
