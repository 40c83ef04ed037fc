"""What end-to-end tests share: a decode loop over any sample decoder, compilation without Inductor, error budgets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

import sfi_compile
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from tests.decoders import VOCAB, Decoder

FULL = {"min_context": 0, "k_head": 100_000}
"""A memory that holds everything: fast steps must equal dense ones."""
SMALL = {"min_context": 0, "sink": 2, "k_head": 8, "recent": 6, "refresh_interval": 8, "min_refresh_gap": 3}
"""A memory far smaller than the context of any test."""


@contextmanager
def eager_lowering() -> Iterator[None]:
    """Run every graph of the backend as plain FX: the same passes and runtime, in seconds less."""
    with mock.patch("sfi_compile.backend.compile_graph", lambda gm, inputs, patches, tag="": gm.forward):
        torch._dynamo.reset()
        yield


@contextmanager
def graphs_of() -> Iterator[list[Work]]:
    """Record the finished work of every decode graph that is compiled meanwhile."""
    works: list[Work] = []
    run = pipeline.run

    def recording(passes: Any, work: Work, *args: Any, **kwargs: Any) -> Work:
        done = run(passes, work, *args, **kwargs)
        if done.slow is not None:
            works.append(done)
        return done

    with mock.patch.object(pipeline, "run", recording):
        yield works


def compiled(model: Any, **options: Any) -> Callable[..., Any]:
    """The model's forward through the backend; `model.forward` itself stays as it is."""
    return torch.compile(model.forward, backend="sfi", options=options)


def dynamo_graphs() -> int:
    """Graphs that Dynamo has compiled since its last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids, int64 [batch, length]; 0 and 1 (padding, begin) are left out."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Run:
    """What a decode loop saw."""

    tokens: Tensor
    """int64 [batch, steps]: what was fed."""
    logits: Tensor
    """[batch, steps + 1, vocab]: after the prompt, then after each step."""
    kinds: list[str]
    """"slow", "fast" or "dense" for each step, by the backend's counters."""
    caches: list[Any]
    """The cache before each step (deep copies), if asked for."""

    @property
    def chosen(self) -> Tensor:
        """Greedy tokens [batch, steps + 1]."""
        return self.logits.argmax(-1)


def decode(
    decoder: Decoder,
    model: Any,
    forward: Callable[..., Any],
    ids: Tensor,
    steps: int,
    cache_len: int,
    tokens: Tensor | None = None,
    keep_caches: bool = False,
) -> Run:
    """Prefill eagerly, then feed one token a row: `tokens` [batch, steps], or greedily."""
    with torch.no_grad():
        torch.manual_seed(0)  # of dropout, where there is any
        cache = decoder.cache(model, ids.shape[0], cache_len)
        logits = [decoder.call(model.forward, ids, cache, 0)[:, -1:]]
        run = Run(tokens=torch.empty(0), logits=logits[0], kinds=[], caches=[])
        fed = []
        for step in range(steps):
            # A slice of `tokens` has other strides than a fresh tensor, which Dynamo would compile a second time.
            token = logits[-1].argmax(-1) if tokens is None else tokens[:, step : step + 1].clone()
            if keep_caches:
                run.caches.append(copy.deepcopy(cache))
            before = sfi_compile.stats()
            logits.append(decoder.call(forward, token, cache, ids.shape[1] + step))
            run.kinds.append(kind_since(before))
            fed.append(token)
    run.tokens, run.logits = torch.cat(fed, 1), torch.cat(logits, 1)
    return run


def kind_since(before: sfi_compile.Stats) -> str:
    """What the one step since `before` was."""
    after = sfi_compile.stats()
    slow, fast = after.slow_steps - before.slow_steps, after.fast_steps - before.fast_steps
    return {(0, 0): "dense", (1, 0): "slow", (0, 1): "fast"}[slow, fast]


def watch(model: Any) -> list[tuple[str, int]]:
    """Check every call of a compiled module against its own uncompiled forward, from the same inputs.

    Returns:
        Grows by (kind, tokens a row) with each call; one that is not "fast" must have the dense output.
    """
    calls: list[tuple[str, int]] = []
    inner = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        own_args, own_kwargs = copy.deepcopy((args, kwargs))
        before = sfi_compile.stats()
        out = inner(*args, **kwargs)
        kind = kind_since(before)
        calls.append((kind, (args[0] if args else kwargs["input_ids"]).shape[1]))
        if kind != "fast":
            wanted = model.forward(*own_args, **own_kwargs).logits
            torch.testing.assert_close(out.logits, wanted, rtol=1e-4, atol=1e-4)
        return out

    model._compiled_call_impl = call
    return calls


def dense_steps(
    decoder: Decoder, model: Any, run: Run, start: int, dtype: torch.dtype, steps: Iterable[int] | None = None
) -> Tensor:
    """These steps of `run` (None: all) again, dense, in `dtype`, each from the very cache that it started with.

    Returns:
        Logits [batch, steps, vocab].
    """
    model = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    out = []
    with torch.no_grad():
        for step in range(len(run.caches)) if steps is None else steps:
            cache = run.caches[step]
            own = as_dtype(cache, dtype)
            if isinstance(own, torch.nn.Module):
                for layer, held in zip(model.layers, own, strict=True):
                    layer.kv_cache = held
            out.append(decoder.call(model.forward, run.tokens[:, step : step + 1].clone(), own, start + step))
    return torch.cat(out, 1)


def as_dtype(cache: Any, dtype: torch.dtype) -> Any:
    """A deep copy of a cache with its floating-point tensors in `dtype`."""
    cache = copy.deepcopy(cache)
    if isinstance(cache, torch.nn.Module):
        return cache.to(dtype)
    if isinstance(cache, transformers.EncoderDecoderCache):
        both = (as_dtype(half, dtype) for half in (cache.self_attention_cache, cache.cross_attention_cache))
        cache.self_attention_cache, cache.cross_attention_cache = both
        cache.encoded.last_hidden_state = cache.encoded.last_hidden_state.to(dtype)
        return cache
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(layer, name, value.to(dtype))
            elif isinstance(value, torch.dtype):
                setattr(layer, name, dtype)
    return cache


def assert_close_to(reference: Tensor, result: Tensor, eager: Tensor, ulps: float = 4.0) -> None:
    """`result` may be twice as far from the float64 `reference` as `eager`, the same dtype's dense attention, is.

    `ulps` (of the largest value) is the floor: where eager happens to be exact, rounding must still be allowed.
    """
    assert result.isfinite().all(), "the result is not finite"
    floor = ulps * torch.finfo(eager.dtype).eps * reference.abs().max().item()
    allowed = 2.0 * (eager.double() - reference).abs().max().item() + floor
    worst = (result.double() - reference).abs().max().item()
    assert worst <= allowed, f"error {worst:.3e}, allowed {allowed:.3e}"
