"""`sfi bench` on a GPU: one cache, used by every way of decoding in turn, and where the time of a step goes.

The ways: `dense` (what a user of transformers gets: static cache, CUDA graphs), `flash` and `kernel` (the best dense
that can be had, see `lab.best_dense`), and `sfi`. They run one after the other: no GPU holds two long caches, and one
that does nothing else is steady enough. A way is timed at all contexts before it is profiled at any, and unless asked
otherwise only `sfi`, which comes last, is: once torch's profiler has run, launches take longer (on an H200, 0.5 ms more
for a step of 500 kernels), and they go on doing so. Imports the package's public names, compat and the lab.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import sfi_compile
from sfi_compile.compat.inductor import fresh_cache
from sfi_compile.lab.bench_settings import DENSE_WAYS, FORCED_SLOW_STEPS, BenchSettings, tell
from sfi_compile.lab.best_dense import kernel_backend, use_flash
from sfi_compile.lab.decode import Decoder, Step, forget_graphs, median
from sfi_compile.lab.profile import kernels_of
from sfi_compile.lab.report import number
from sfi_compile.lab.shapes import Shape, build, cache_bytes, filled_cache, rewind, weight_bytes

WARM_STEPS = 20
"""Untimed steps before the measured ones: they compile and record CUDA graphs, and the first after that are slower."""
DENSE_STEPS = 16
PROFILED_STEPS = 4
PROFILE_WARM_STEPS = 2
PER_CONTEXT = ("dense", "flash")
"""Ways whose graph depends on the context."""
MODE = "reduce-overhead"
"""Inductor mode of all runs: CUDA graphs."""


@dataclasses.dataclass
class Found:
    """What one way of decoding took."""

    ms: dict[str, float | None]
    """Median by kind of step: dense, or slow and fast."""
    natural: list[float]
    """All measured steps as they came, ms."""
    stats: sfi_compile.Stats | None
    """Counters of the measured steps."""
    profile: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By kind of step, of `lab.profile.kernels_of`."""
    peak_bytes: int = 0
    """Most that was allocated at once beside model and cache."""
    compile_s: float | None = None
    """None: compiled for another context before."""
    sites: int = 0
    memory_bytes: int = 0
    cache_bytes: int = 0


def measure_on_gpu(
    shape: Shape,
    batch: int,
    settings: BenchSettings,
    bandwidth: float,
    status: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """The rows of a shape and batch, one for each context; keys as in docs/cli.md.

    One cache, long enough for the longest context, serves every context, so `kernel` and `sfi` are compiled once. What
    a user of transformers gets depends on what is allocated: `dense` has a cache that fits each context.

    Args:
        keep: is given all rows after every measurement; what is still to come is None.
    """
    width, contexts = settings.step_tokens, sorted(settings.contexts)
    steps = max(WARM_STEPS + settings.new_tokens + FORCED_SLOW_STEPS, PROFILE_WARM_STEPS + 2 * PROFILED_STEPS)
    longest = contexts[-1] + steps * width
    status("building the decoder")
    model = build(shape, settings.dtype, settings.device, longest)
    cache = filled_cache(model, shape, batch, contexts[-1], longest)
    tokens = torch.randint(shape.vocab, (steps, batch, width), device=settings.device)
    weights = weight_bytes(model, shape, batch * width)
    found: dict[int, dict[str, Found]] = {context: {} for context in contexts}

    def save() -> None:
        keep([_row(shape, batch, c, settings, bandwidth, weights, found[c]) for c in contexts])

    for way in settings.ways:
        decoder = None
        for context in contexts:
            about = functools.partial(tell, status, f"{way}, context {context}")
            own, compiles = cache, decoder is None or way in PER_CONTEXT
            if decoder is None or compiles:
                forget_graphs()
                decoder = None
                if way == "dense" and context < contexts[-1]:
                    own = filled_cache(model, shape, batch, context, context + steps * width)
                decoder = _decoder(way, model, own, context, settings.backend_options(shape.vocab))
            rewind(own, context)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(settings.device)
            held = torch.cuda.memory_allocated(settings.device)
            with fresh_cache() if compiles else nullcontext():
                one = found[context][way] = _run(way, decoder, tokens, settings.new_tokens, about)
            one.compile_s = decoder.compile_seconds() if compiles else None
            one.peak_bytes = torch.cuda.max_memory_allocated(settings.device) - held
            one.sites, one.memory_bytes, one.cache_bytes = decoder.sites(), decoder.memory_bytes(), cache_bytes(own)
            about(", ".join(f"{kind} {number(ms, '.4g')} ms" for kind, ms in one.ms.items()))
            save()
        for context in contexts if way not in PER_CONTEXT else contexts[-1:]:
            if decoder is not None and (settings.profile or way == settings.ways[-1]):
                tell(status, f"{way}, context {context}", "profiling")
                rewind(own, context)
                found[context][way].profile = _profile(way, decoder, tokens)
                save()
        if way == "flash":
            model.set_attn_implementation("sdpa")
    forget_graphs()


def _row(
    shape: Shape,
    batch: int,
    context: int,
    settings: BenchSettings,
    bandwidth: float,
    weights: int,
    found: dict[str, Found],
) -> dict[str, Any]:
    itemsize = torch.empty(0, dtype=settings.dtype).element_size()
    sfi = found.get("sfi")
    counted = None if sfi is None else sfi.stats
    support = 0.0 if counted is None else counted.support or 0.0
    floors = [(weights + shape.support_bytes(batch, n, itemsize)) / bandwidth * 1e3 for n in (context, support)]
    return {
        "batch": batch,
        "context": context,
        "step_tokens": settings.step_tokens,
        **{f"{way}_ms": _round(found[way].ms["dense"]) if way in found else None for way in DENSE_WAYS},
        **{f"{kind}_ms": _round(sfi.ms[kind]) if sfi else None for kind in ("slow", "fast")},
        "mean_ms": _round(statistics.fmean(sfi.natural)) if sfi else None,
        "dense_floor_ms": _round(floors[0]),
        "floor_ms": _round(floors[1]) if sfi else None,
        "compile_s": {way: round(one.compile_s, 1) for way, one in found.items() if one.compile_s is not None},
        "peak_bytes": {way: one.peak_bytes for way, one in found.items()},
        "cache_bytes": {way: one.cache_bytes for way, one in found.items()},
        "profile": {way: one.profile for way, one in found.items()},
        "memory_bytes": sfi.memory_bytes if sfi else None,
        "steps": {"slow": counted.slow_steps, "fast": counted.fast_steps} if counted else None,
        "triggers": dict(counted.triggers) if counted else None,
        "support": counted.support if counted else None,
        "sites": sfi.sites if sfi else None,
        "rejections": [rejection.as_dict() for rejection in counted.rejections] if counted else None,
    }


def _decoder(way: str, model: Any, cache: Any, context: int, options: dict[str, Any]) -> Decoder:
    if way == "dense":
        return Decoder(model, cache, "inductor", mode=MODE)
    if way == "flash":
        use_flash(model, context + 1)
        return Decoder(model, cache, "inductor", mode=MODE)
    if way == "kernel":
        return Decoder(model, cache, kernel_backend(MODE))
    return Decoder(model, cache, "sfi", {"mode": MODE, **options})


def _steps(decoder: Decoder, tokens: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step with the next of the tokens, and one that must be slow."""
    stream = iter(tokens)

    def step() -> None:
        decoder.step(next(stream))

    def slow_step() -> None:
        sfi_compile.reset()
        step()

    return step, slow_step


def _run(way: str, decoder: Decoder, tokens: torch.Tensor, new_tokens: int, status: Callable[[str], None]) -> Found:
    step, slow_step = _steps(decoder, tokens)
    status("warming up")
    for i in range(WARM_STEPS):
        if way == "sfi" and i in (2, 4):
            slow_step()  # both variants, each often enough to be recorded
        else:
            step()
    status("measuring")
    sfi_compile.reset()
    first = len(decoder.steps)
    for _ in range(new_tokens if way == "sfi" else min(new_tokens, DENSE_STEPS)):
        step()
    natural = decoder.steps[first:]
    stats = sfi_compile.stats() if way == "sfi" else None
    ms = {"dense": _ms(natural)}
    if stats is not None:
        forced = len(decoder.steps)
        for _ in range(FORCED_SLOW_STEPS):
            slow_step()
        ms = {"slow": _ms(decoder.steps[forced:]), "fast": _ms([s for s in natural if s.kind == "fast"])}
    return Found(ms, [1e3 * s.seconds for s in natural], stats)


def _profile(way: str, decoder: Decoder, tokens: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Where the time of each kind of step goes, from a context to which the cache was rewound."""
    step, slow_step = _steps(decoder, tokens)
    if way != "sfi":
        return {"dense": kernels_of(step, PROFILED_STEPS)}
    for _ in range(PROFILE_WARM_STEPS):
        slow_step()  # what the guard asks of an invalid memory is captured when it is asked again
    # After a refresh come fast steps: no boundary counts before the smallest gap.
    return {"slow": kernels_of(slow_step, PROFILED_STEPS), "fast": kernels_of(step, PROFILED_STEPS)}


def _ms(steps: list[Step]) -> float | None:
    found = median([s.seconds for s in steps])
    return None if found is None else 1e3 * found


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
