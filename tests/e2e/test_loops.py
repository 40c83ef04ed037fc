"""Decode loops written by hand: chunks, drafts, other batch sizes and dtypes, graph breaks, single layers, weights in
int8."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sfi_compile
from sfi_compile.lab.families import build, dynamic_cache
from tests.decoders import BY_NAME
from tests.harness import (
    FULL,
    SMALL,
    assert_close_to,
    compiled,
    decode,
    dense_steps,
    dynamo_graphs,
    eager_lowering,
    kind_since,
    prompt,
)

LLAMA = BY_NAME["llama"]


def feed(
    forward: Callable[..., Any], cache: Any, tokens: Tensor, lengths: tuple[int, ...]
) -> tuple[list[Tensor], list[str]]:
    """Feed `tokens` [batch, all], cut into calls of these lengths: logits and kind of each call."""
    logits, kinds = [], []
    for piece in tokens.split(lengths, dim=1):
        before = sfi_compile.stats()
        logits.append(LLAMA.call(forward, piece.clone(), cache, 0))
        kinds.append(kind_since(before))
    return logits, kinds


def assert_all_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)


def test_a_prompt_in_chunks_then_steps() -> None:
    model, _ = LLAMA.build()
    lengths = (7, 7, 7, 2) + (1,) * 12
    tokens = prompt(2, sum(lengths))
    with torch.no_grad(), eager_lowering():
        wanted, _ = feed(model.forward, LLAMA.cache(model, 2, 64), tokens, lengths)
        ours, kinds = feed(compiled(model, **FULL), LLAMA.cache(model, 2, 64), tokens, lengths)
    assert_all_close(ours, wanted)
    # The first allocates the cache; chunks of up to eight tokens are steps, as long as their number is fixed.
    assert kinds == ["dense", "slow", "fast", "dense", "slow"] + ["fast"] * 11
    assert sfi_compile.stats().graphs == 2


@pytest.mark.parametrize("options", [FULL, SMALL], ids=["full", "small"])
def test_several_tokens_in_one_step_are_dense_and_drop_the_memory(options: dict[str, Any]) -> None:
    model, _ = LLAMA.build()
    tokens = prompt(1, 100)
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **options)
        cache = LLAMA.cache(model, 1, 128)
        feed(model.forward, cache, tokens[:, :20], (20,))
        at = 20
        for drafted in (2, 5, 8, 3, 7):
            lengths = (1, 1, 1, drafted)
            piece = tokens[:, at : at + sum(lengths)]
            twin = copy.deepcopy(cache)
            logits, kinds = feed(forward, cache, piece, lengths)
            assert kinds == ["slow", "fast", "fast", "dense"]
            if options is FULL:
                assert_all_close(logits, feed(model.forward, twin, piece, lengths)[0])
            else:
                assert_all_close(logits[:1], feed(model.forward, twin, piece[:, :1], (1,))[0])
            at += sum(lengths)
    assert sfi_compile.stats().graphs == 1
    assert dynamo_graphs() <= 3  # one token, and the several tokens first static, then symbolic
    assert [r.code for r in sfi_compile.stats().rejections] == ["symbolic-tokens"]


def test_batch_size_and_dtype_change_between_calls() -> None:
    model, _ = LLAMA.build()
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **FULL)
        for _ in range(2):
            for batch, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (1, torch.bfloat16)):
                model.to(dtype)
                tokens = prompt(batch, 28, batch)
                both = [LLAMA.cache(model, batch, 64) for _ in range(2)]
                for cache in both:
                    feed(model.forward, cache, tokens[:, :20], (20,))
                wanted, _ = feed(model.forward, both[0], tokens[:, 20:], (1,) * 8)
                ours, kinds = feed(forward, both[1], tokens[:, 20:], (1,) * 8)
                assert kinds == ["slow"] + ["fast"] * 7
                error = 1e-4 if dtype == torch.float32 else 0.1
                torch.testing.assert_close(torch.cat(ours), torch.cat(wanted), rtol=error, atol=error)
    assert sfi_compile.stats().graphs == dynamo_graphs() == 4


def test_half_precision_steps() -> None:
    model, _ = LLAMA.build()
    model.to(torch.float16)
    with eager_lowering():
        run = decode(LLAMA, model, compiled(model, **FULL), prompt(2, 20), 12, 48, prompt(2, 12, 1), True)
    eager = dense_steps(LLAMA, model, run, 20, torch.float16)
    exact = dense_steps(LLAMA, model, run, 20, torch.float64)
    assert run.kinds == ["slow"] + ["fast"] * 11
    assert_close_to(exact, run.logits[:, 1:], eager)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("settings", [{}, {"dynamic": True, "fullgraph": True}], ids=["static", "dynamic"])
def test_gradient_modes(context: str, settings: dict[str, bool]) -> None:
    model, _ = LLAMA.build()  # its parameters require no gradients
    tokens = prompt(1, 28)
    with CONTEXTS[context](), eager_lowering():
        forward = torch.compile(model.forward, backend="sfi", options=FULL, **settings)
        both = [LLAMA.cache(model, 1, 64) for _ in range(2)]
        for cache in both:
            feed(model.forward, cache, tokens[:, :20], (20,))
        wanted, _ = feed(model.forward, both[0], tokens[:, 20:], (1,) * 8)
        ours, kinds = feed(forward, both[1], tokens[:, 20:], (1,) * 8)
    assert_all_close(ours, wanted)
    assert kinds == ["slow"] + ["fast"] * 7
    assert sfi_compile.stats().graphs == dynamo_graphs() == 1


class Break(nn.Module):
    """A module that Dynamo cannot trace into one graph with what comes before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


def run_in_pieces(model: Any, forward: Callable[..., Any], steps: int = 16) -> Tensor:
    """Logits [1, steps, vocab] after a prompt of 20 tokens, which runs uncompiled."""
    tokens = prompt(1, 20 + steps)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        cache = LLAMA.cache(model, 1, 64)
        LLAMA.call(model, tokens[:, :20], cache, 0)
    with torch.no_grad():
        return torch.cat([LLAMA.call(forward, t.clone(), cache, 0) for t in tokens[:, 20:].split(1, dim=1)], 1)


@pytest.mark.parametrize(
    ("before", "options"),
    [("mlp", FULL), ("input_layernorm", FULL), ("input_layernorm", SMALL)],
    ids=["in-layers", "between-layers", "between-layers-small"],
)
def test_every_piece_of_a_broken_graph_decides_alone(before: str, options: dict[str, Any]) -> None:
    model, _ = LLAMA.build()
    wanted = run_in_pieces(model, model.forward)
    for layer in model.model.layers:
        setattr(layer, before, Break(getattr(layer, before)))
    with eager_lowering():
        ours = run_in_pieces(model, compiled(model, **options))
    stats = sfi_compile.stats()
    assert stats.graphs == 2
    assert stats.slow_steps + stats.fast_steps == 2 * 16
    if options is FULL:
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
        assert stats.fast_steps == 2 * 15
    else:
        torch.testing.assert_close(ours[:, :1], wanted[:, :1], rtol=1e-4, atol=1e-4)
        assert stats.fast_steps == 2 * 14


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="sfi", options=FULL)


def accelerate_layers(model: Any) -> None:
    for layer in model.model.layers:
        sfi_compile.accelerate(layer, **FULL)


@pytest.mark.parametrize("way", [compile_layers, accelerate_layers])
def test_layers_compiled_one_by_one(way: Callable[[Any], None]) -> None:
    model, _ = LLAMA.build()
    wanted = run_in_pieces(model, model.forward)
    with eager_lowering():
        way(model)
        ours = run_in_pieces(model, model)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert (sfi_compile.stats().slow_steps, sfi_compile.stats().fast_steps) == (2, 2 * 15)
    assert sfi_compile.stats().graphs == dynamo_graphs() == 2


@pytest.mark.parametrize(("way", "layers", "limit"), [(compile_layers, 10, 8), (accelerate_layers, 4, 2)])
def test_more_layers_than_dynamo_compiles(
    way: Callable[[Any], None], layers: int, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("Llama", num_hidden_layers=layers)()
    wanted = run_in_pieces(model, model.forward, 4)
    with (
        eager_lowering(),
        caplog.at_level(logging.WARNING, "sfi_compile"),
        torch._dynamo.config.patch(recompile_limit=limit),
    ):
        way(model)
        ours = run_in_pieces(model, model, 4)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    gave_up = way is compile_layers  # one by one, accelerated layers have a limit each
    assert caplog.text.count("or raise torch._dynamo.config.recompile_limit") == gave_up
    assert sfi_compile.stats().graphs == (limit if gave_up else layers)
    assert sfi_compile.stats().fast_steps == 3 * sfi_compile.stats().graphs


def test_caches_of_several_lengths_in_turns() -> None:
    model, _ = LLAMA.build()
    tokens = prompt(1, 30)
    sizes = (40, 64, 96)
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **FULL)
        ours, dense = ([LLAMA.cache(model, 1, size) for size in sizes] for _ in range(2))
        for cache in (*ours, *dense):
            feed(model.forward, cache, tokens[:, :20], (20,))
        for step in range(10):
            token = tokens[:, 20 + step : 21 + step]
            for mine, other in zip(ours, dense, strict=True):
                found, kinds = feed(forward, mine, token, (1,))
                assert kinds == ["fast" if step else "slow"]  # each length has a graph and a memory of its own
                assert_all_close(found, feed(model.forward, other, token, (1,))[0])
    assert sfi_compile.stats().graphs == 3


def test_a_growing_cache_is_dense_and_names_the_cure() -> None:
    model, _ = LLAMA.build()
    tokens = prompt(1, 30)
    with torch.no_grad(), eager_lowering():
        both = [dynamic_cache(model, 1, 0) for _ in range(2)]
        wanted, _ = feed(model.forward, both[0], tokens, (20, *(1,) * 10))
        ours, kinds = feed(compiled(model, **FULL), both[1], tokens, (20, *(1,) * 10))
    assert_all_close(ours, wanted)
    assert set(kinds) == {"dense"}
    assert len(sfi_compile.stats().rejections) == LLAMA.sites
    assert all('generate(cache_implementation="static")' in r.hint for r in sfi_compile.stats().rejections)


def test_weights_in_int8() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, _ = LLAMA.build()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert any(type(weight) is not nn.Parameter for weight in model.parameters())
    wanted = run_in_pieces(model, model.forward)
    with eager_lowering():
        ours = run_in_pieces(model, compiled(model, **FULL))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert (sfi_compile.stats().slow_steps, sfi_compile.stats().fast_steps) == (1, 15)
    assert sfi_compile.stats().rejections == ()
