"""`sfi bench --kernel`: attention over the memory against flash attention over the whole context, on this GPU.

Imports the operators, kernels, `compat.inductor` and the lab.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sfi_compile import ops
from sfi_compile.compat.inductor import fresh_cache
from sfi_compile.kernels import lowering
from sfi_compile.lab.bench import versions
from sfi_compile.lab.errors import LabError

QUERY_HEADS, KV_HEADS, WIDTH = 32, 8, 128
DTYPE = torch.bfloat16
KEPT_PERCENT = 1.6, 6.3, 12.5, 25.0, 50.0
COLD_BYTES = 400_000_000
"""Launches go round memories of at least so many bytes, far more than any cache holds."""
MOST_COPIES = 16
LAUNCHES = 24
"""Launches in one CUDA graph, at least; the gaps between them are those of a decode step."""
REPLAYS = 7
TOLERANCE = 2.0
"""Allowed error, in units of the plain form's own."""


@dataclasses.dataclass(frozen=True)
class KernelBenchSettings:
    """What to measure: every batch × context × share of slots kept."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    seed: int = 0


def run_kernel_bench(settings: KernelBenchSettings, status: Callable[[str], None]) -> dict[str, Any]:
    """Measure every row; keys as in docs/cli.md. `status` is told what is going on.

    Raises:
        LabError: no GPU, one that the kernel does not run on, or a result that is wrong.
    """
    if not torch.cuda.is_available():
        raise LabError("--kernel measures a GPU kernel, and torch sees no CUDA device; allowed here: bench without it")
    torch.manual_seed(settings.seed)
    lowering.register()
    rows = []
    for batch in settings.batches:
        for context in settings.contexts:
            status(f"batch {batch}, context {context}: flash attention")
            flash = _microseconds(_flash, _memories(batch, context))
            for percent in KEPT_PERCENT:
                slots = max(1, round(context * percent / 100))
                status(f"batch {batch}, context {context}: {slots} slots")
                rows.append({"batch": batch, "context": context, "kept_percent": percent, "slots": slots})
                took = _attention(batch, slots)
                rows[-1] |= {
                    "kernel_us": round(took, 2),
                    "flash_us": round(flash, 2),
                    "speedup": round(flash / took, 2),
                }
    return {"rows": rows, "versions": versions()}


def _attention(batch: int, slots: int) -> float:
    """Microseconds of the compiled operator, all its kernels together, after a check of what it computes."""
    memories = _memories(batch, slots)
    reason = lowering.supports(*memories[0][:3])
    if reason is not None:
        raise LabError(f"--kernel: {reason.explanation} ({reason.hint})")
    newest = torch.tensor(slots, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> Tensor:
        # As in a fast step, the mask is computed from the positions that the slots hold.
        mask = (held <= newest).unsqueeze(2)
        found: Tensor = torch.ops.sfi.memory_attention(q, k, v, held, mask, WIDTH**-0.5)
        return found

    torch._dynamo.reset()
    with fresh_cache():
        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        _check(compiled(*memories[0]), *memories[0])
        return _microseconds(compiled, memories)


def _check(found: Tensor, q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> None:
    mask = torch.ones(*held.shape[:2], 1, held.shape[2], dtype=torch.bool, device=held.device)
    exact = ops.memory_attention(q.double(), k.double(), v.double(), held, mask, WIDTH**-0.5)
    plain = ops.memory_attention(q, k, v, held, mask, WIDTH**-0.5)
    error, allowed = ((x.double() - exact).abs().max().item() for x in (found, plain))
    if not error <= TOLERANCE * allowed:
        raise LabError(f"the kernel is off by {error:.2g} at {held.shape[2]} slots; allowed: {TOLERANCE * allowed:.2g}")


def _flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _memories(batch: int, slots: int) -> list[tuple[Tensor, ...]]:
    """Queries, keys, values and held positions, as often as it takes to find caches cold."""
    size = 2 * batch * KV_HEADS * slots * WIDTH * DTYPE.itemsize
    copies = min(MOST_COPIES, max(2, -(-COLD_BYTES // size)))
    held = torch.arange(slots, device="cuda").expand(batch, KV_HEADS, slots)
    return [
        (
            torch.randn(batch, QUERY_HEADS, 1, WIDTH, dtype=DTYPE, device="cuda"),
            *(torch.randn(batch, KV_HEADS, slots, WIDTH, dtype=DTYPE, device="cuda") for _ in range(2)),
            held.clone(),
        )
        for _ in range(copies)
    ]


def _microseconds(function: Callable[..., Tensor], inputs: Sequence[tuple[Tensor, ...]]) -> float:
    """Median time of one call in a CUDA graph of many."""
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    rounds = -(-LAUNCHES // len(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for arguments in inputs:
                function(*arguments)
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (rounds * len(inputs)))
    return statistics.median(times)
