"""`sfi bench`: dense, slow and fast steps of one decoder shape in one run, each step named by the backend's counters.

Imports the package's public names, `compat.inductor` and the lab.
"""

from __future__ import annotations

import copy
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import sfi_compile
from sfi_compile.compat.inductor import fresh_cache
from sfi_compile.lab.bench_gpu import measure_on_gpu
from sfi_compile.lab.bench_settings import FORCED_SLOW_STEPS, BenchSettings, tell
from sfi_compile.lab.decode import Decoder, forget_graphs, interquartile_range, median, synchronize
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.peak import peak_above, peak_rss
from sfi_compile.lab.shapes import Shape, build, cache_bytes, filled_cache, find_shape, weight_bytes

WARM_STEPS = 6
"""Untimed steps before the measured ones: they compile."""
PEAK_STEPS = 4
"""Steps at the end whose memory is measured: one slow, then fast ones."""
DENSE_STEPS = 32
"""About so many dense steps are timed."""
BLOCK = 8
"""SFI steps between two turns of the dense run."""
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Size of the buffer whose copy measures the memory bandwidth: on a GPU so large that the launch counts for nothing."""


def run_bench(
    settings: BenchSettings, status: Callable[[str], None], keep: Callable[[dict[str, Any]], None] = lambda so_far: None
) -> dict[str, Any]:
    """Measure every row; keys as in docs/cli.md. `status` is told what is going on, `keep` given what there is so far.

    Raises:
        LabError: unknown shape, or a row without a single fast step.
    """
    chosen = {name: find_shape(name, settings.layers) for name in settings.shapes}
    status("measuring the memory bandwidth")
    bandwidth = copy_bandwidth(settings.device)
    about = {"bandwidth_gb_s": bandwidth / 1e9, "versions": versions(), "threads": torch.get_num_threads()}
    rows: list[dict[str, Any]] = []
    for name, shape in chosen.items():
        for batch in settings.batches:
            done = len(rows)

            def add(found: list[dict[str, Any]], name: str = name, done: int = done) -> None:
                rows[done:] = [{"shape": name} | row for row in found]
                keep({"rows": rows} | about)

            torch.manual_seed(settings.seed)
            measure = measure_on_gpu if settings.device.startswith("cuda") else _measure_all
            measure(shape, batch, settings, bandwidth, functools.partial(tell, status, f"{name}, batch {batch}"), add)
    return {"rows": rows} | about


def _measure_all(
    shape: Shape,
    batch: int,
    settings: BenchSettings,
    bandwidth: float,
    status: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    rows: list[dict[str, Any]] = []
    for context in settings.contexts:
        torch.manual_seed(settings.seed)
        about = functools.partial(tell, status, f"context {context}")
        rows.append(_measure(shape, batch, context, settings, bandwidth, about))
        # Measuring single steps makes the system forget the peak before.
        peaks = [row["peak_rss_bytes"] for row in rows if row["peak_rss_bytes"] is not None]
        rows[-1]["peak_rss_bytes"] = max(peaks, default=None)
        keep(rows)


def _measure(
    shape: Shape,
    batch: int,
    context: int,
    settings: BenchSettings,
    bandwidth: float,
    status: Callable[[str], None],
) -> dict[str, Any]:
    steps, width = WARM_STEPS + settings.new_tokens + FORCED_SLOW_STEPS + PEAK_STEPS, settings.step_tokens
    longest = context + steps * width
    status("building the decoder")
    model = build(shape, settings.dtype, settings.device, longest)
    cache = filled_cache(model, shape, batch, context, longest)
    tokens = torch.randint(shape.vocab, (steps, batch, width), device=settings.device)

    # Each run has a cache of its own: steps of the other would break the continuity that a memory is checked for.
    forget_graphs()
    dense = Decoder(model, copy.deepcopy(cache), "inductor")
    sparse = Decoder(model, cache, "sfi", settings.backend_options(shape.vocab))
    for name_of_run, run in (("dense", dense), ("sfi", sparse)):
        status(f"{name_of_run}: compiling")
        with fresh_cache():
            for step in range(WARM_STEPS):
                run.step(tokens[step])

    # The runs take turns, so that both meet the same load of the machine.
    status("measuring")
    measured = range(WARM_STEPS, WARM_STEPS + settings.new_tokens)
    every = max(1, settings.new_tokens // DENSE_STEPS)
    for start in range(0, len(measured), BLOCK):
        block = measured[start : start + BLOCK]
        for step in block:
            sparse.step(tokens[step])
        for step in block[::every]:
            dense.step(tokens[step])
    counted = sfi_compile.stats()
    forced = range(measured.stop, measured.stop + FORCED_SLOW_STEPS)
    for step in forced:
        sfi_compile.reset()
        sparse.step(tokens[step])
        dense.step(tokens[step])
    if not sparse.timed("fast"):
        reasons = [f"{counted.slow_steps} slow steps, {counted.short_steps} of them short of the minimum context"]
        reasons += [str(rejection) for rejection in counted.rejections]
        raise LabError(f"batch {batch}, context {context}: no fast step was timed ({'; '.join(reasons)})")
    timed = {kind: decoder.timed(kind) for kind, decoder in (("dense", dense), ("slow", sparse), ("fast", sparse))}
    so_far = peak_rss()  # before it is reset to measure single steps
    peaks = _peaks(dense, sparse, tokens[forced.stop :])
    natural = [s.seconds for s in sparse.steps[WARM_STEPS : WARM_STEPS + settings.new_tokens] if not s.compiled]
    itemsize = torch.empty(0, dtype=settings.dtype).element_size()
    read = weight_bytes(model, shape) + shape.support_bytes(batch, counted.support or 0.0, itemsize)
    return {
        "batch": batch,
        "context": context,
        "step_tokens": width,
        **{f"{kind}_ms": _ms(median(seconds)) for kind, seconds in timed.items()},
        "mean_ms": _ms(statistics.fmean(natural) if natural else None),
        "floor_ms": _ms(read / bandwidth),
        "spread": {kind: _ms(interquartile_range(seconds)) for kind, seconds in timed.items()},
        "compile_s": {"dense": round(dense.compile_seconds(), 2), "sfi": round(sparse.compile_seconds(), 2)},
        "memory_bytes": sparse.memory_bytes(),
        "cache_bytes": cache_bytes(cache),
        "step_peak_bytes": peaks,
        "peak_rss_bytes": so_far,
        "steps": {kind: len(seconds) for kind, seconds in timed.items()},
        "processor_share": {"dense": dense.processor_share(), "sfi": sparse.processor_share()},
        "triggers": dict(counted.triggers),
        "support": counted.support,
        "sites": sparse.sites(),
        "rejections": [rejection.as_dict() for rejection in counted.rejections],
    }


def _peaks(dense: Decoder, sparse: Decoder, tokens: torch.Tensor) -> dict[str, int | None]:
    """Bytes by which one step of each kind exceeds what was held before it; the largest of a few steps."""
    largest: dict[str, int | None] = {}
    sfi_compile.reset()
    for token in tokens:
        for run in (dense, sparse):
            peak = peak_above(functools.partial(run.step, token))
            kind = run.steps[-1].kind
            largest[kind] = None if peak is None else max(peak, largest.get(kind) or 0)
    return largest


def copy_bandwidth(device: str) -> float:
    """Bytes/s that a copy moves (read plus written), the best of a few; the rate behind `floor_ms`."""
    size = COPY_BYTES[torch.device(device).type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(7):
        synchronize(torch.device(device))
        start = time.perf_counter()
        target.copy_(source)
        synchronize(torch.device(device))
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on, and the processor; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("sfi-compile", "torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    processor = platform.processor() or platform.machine()
    found["processor"] = torch.cuda.get_device_name() if torch.cuda.is_available() else processor
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)
