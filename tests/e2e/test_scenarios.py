"""Situations that users of such systems report, reduced: padding, other caches, crop, reset, windows, tiny sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sfi_compile
from sfi_compile import diagnostics
from sfi_compile.lab.handwritten import OwnBlock, OwnDecoder
from tests.decoders import BY_NAME, CACHE, WINDOW, Decoder, llama
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


def padded(lengths: tuple[int, ...], longest: int) -> tuple[Tensor, Tensor]:
    """Random prompts padded on the left: ids and mask, int64 [batch, longest]."""
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return prompt(len(lengths), longest) * mask, mask.long()


@pytest.mark.parametrize(
    ("dtype", "batch"), [(torch.float32, 2), (torch.bfloat16, 4), (torch.float16, 8)], ids=["f32-2", "bf16-4", "f16-8"]
)
def test_padding_never_enters_a_support_and_nothing_is_nan(dtype: torch.dtype, batch: int) -> None:
    lengths = tuple(1 + (5 * row + 2) % 23 for row in range(batch))
    ids, mask = padded(lengths, 23)
    model = LLAMA.build()[0].to(dtype)
    how = {"max_new_tokens": 20, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with eager_lowering():
        model.compile(backend="sfi", options=SMALL | {"boundary_token_ids": range(0, 128, 7)})
        cache = transformers.StaticCache(config=model.config, max_cache_len=4096)
        ours = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **how)
    assert torch.stack(ours.scores).isfinite().all()
    stats = sfi_compile.stats()
    assert stats.graphs == 1
    assert stats.fast_steps > 0
    (runner,) = diagnostics.runners
    held = [t for name, t in runner.state.items() if name.startswith("sfi_held")]
    assert len(held) == LLAMA.sites
    for positions in held:
        for row, length in enumerate(lengths):
            used = positions[row][positions[row] >= 0]
            assert used.min() == 23 - length
            assert used.max() == 23 + 20 - 2
    for name, t in runner.state.items():
        assert not name.startswith("sfi_mem") or t.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt-fast"])
def test_a_longer_cache_later(name: str) -> None:
    decoder = BY_NAME[name]
    model, _ = decoder.build()
    with eager_lowering():
        forward = compiled(model, **FULL)
        for size, steps in ((40, 20), (160, 120), (40, 20)):
            ids = prompt(1, 12, size)
            wanted = decode(decoder, model, model.forward, ids, steps, size)
            ours = decode(decoder, model, forward, ids, steps, size)
            assert ours.chosen.tolist() == wanted.chosen.tolist()
            assert ours.kinds.count("fast") > steps // 2
    assert sfi_compile.stats().graphs == 2


@pytest.mark.parametrize("name", ["llama", "gpt-fast"])
def test_running_past_the_end_names_the_position(name: str) -> None:
    decoder = BY_NAME[name]
    model, _ = decoder.build()
    with eager_lowering(), pytest.raises(IndexError, match=r"position 16 .* holds 16 positions"):
        decode(decoder, model, compiled(model, **SMALL), prompt(1, 12), 5, 16)


@pytest.mark.skipif(not hasattr(transformers.cache_utils.StaticLayer, "crop"), reason="static caches cannot be cropped")
def test_crop_after_rejected_drafts() -> None:
    model, config = LLAMA.build()
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    twin = transformers.StaticCache(config=config, max_cache_len=64)
    fed = prompt(2, 60, 1)
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **SMALL)
        for each in (cache, twin):
            LLAMA.call(model.forward, prompt(2, 20), each, 0)
        at = 0
        for _ in range(4):
            for drafted in (3, 1):  # one step with several tokens, then single ones
                for new in (drafted, 1):
                    tokens = fed[:, at : at + new].clone()
                    before = sfi_compile.stats()
                    ours = LLAMA.call(forward, tokens, cache, 0)
                    if new > 1 or kind_since(before) == "slow":
                        twin_cache_is(twin, cache, new)
                        wanted = LLAMA.call(model.forward, tokens, twin, 0)
                        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
                    at += new
            cache.crop(-2)
            at -= 2
            before = sfi_compile.stats()
            LLAMA.call(forward, fed[:, at : at + 1].clone() * 0 + 9, cache, 0)
            assert kind_since(before) == "slow", "a memory outlived a crop"
            (runner,) = (r for r in diagnostics.runners if r.guard.queries == 1)
            assert int(runner.state["sfi_held_0"].max()) == int(cache.layers[0].cumulative_length) - 1
            at += 1
    assert sfi_compile.stats().graphs == 2  # of one token, and of three


def twin_cache_is(twin: Any, cache: Any, new: int) -> None:
    """Make `twin` what `cache` was before its last `new` tokens."""
    for mine, other in zip(twin.layers, cache.layers, strict=True):
        mine.keys.copy_(other.keys)
        mine.values.copy_(other.values)
        mine.cumulative_length.copy_(other.cumulative_length - new)


@pytest.mark.parametrize("decoder", [BY_NAME["cohere2"], BY_NAME["qwen2-window"]], ids=lambda d: d.name)
def test_windows_long_after_they_are_full(decoder: Decoder) -> None:
    model, _ = decoder.build()
    ids = prompt(1, 12)
    dense = decode(decoder, model, model.forward, ids, 200, 256)
    with eager_lowering():
        ours = decode(decoder, model, compiled(model, **FULL), ids, 200, 256)
    assert ours.chosen.tolist() == dense.chosen.tolist()
    assert ours.kinds.count("fast") > 150
    assert dynamo_graphs() == sfi_compile.stats().graphs == 2  # the window's python int is generalised once
    assert {runner.sites for runner in diagnostics.runners} == {decoder.sites}


def test_a_window_that_fills_up_while_decoding() -> None:
    decoder = BY_NAME["cohere2"]
    model, _ = decoder.build()
    ids = prompt(1, 3)
    dense = decode(decoder, model, model.forward, ids, 100, 128)
    with eager_lowering():
        ours = decode(decoder, model, compiled(model, **FULL), ids, 100, 128)
    assert ours.chosen.tolist() == dense.chosen.tolist()
    assert ours.kinds[-50:].count("fast") > 40


class _Windowed(OwnBlock):
    """Attends to the last few tokens of a cache that holds all."""

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, where: Any) -> Tensor:
        near = torch.arange(mask.shape[-1]) > positions[:, None] - WINDOW
        return super().forward(x, mask & near, positions, where)


def test_a_window_in_the_mask_does_not_keep_the_other_layers_slow() -> None:
    """A row is as long as its longest context, whichever layer has it."""
    torch.manual_seed(0)
    blocks = iter([OwnBlock(64, 4), _Windowed(64, 4)])
    model = OwnDecoder(lambda: next(blocks)).eval().requires_grad_(False)
    decoder = BY_NAME["gpt-fast"]
    dense = decode(decoder, model, model.forward, prompt(1, 40), 30, 96)
    with eager_lowering():
        ours = decode(decoder, model, compiled(model, **FULL | {"min_context": 50}), prompt(1, 40), 30, 96)
    assert ours.kinds == ["slow"] * 9 + ["slow" if step % 18 == 0 else "fast" for step in range(21)]
    assert ours.chosen.tolist() == dense.chosen.tolist()
    assert sfi_compile.stats().short_steps == 9


@pytest.mark.parametrize("length", [5, 30, 31, 32, 40])
def test_reset_and_another_prompt_of_any_length(length: int) -> None:
    model, config = LLAMA.build()
    fed = prompt(1, 11, 3)
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **SMALL)
        results = []
        for dirty in (True, False):
            cache = transformers.StaticCache(config=config, max_cache_len=64)
            if dirty:
                LLAMA.call(model.forward, prompt(1, 20, 1), cache, 0)
                for step in range(11):  # ends at position 30
                    LLAMA.call(forward, fed[:, step : step + 1].clone(), cache, 0)
                cache.reset()
            LLAMA.call(model.forward, prompt(1, length, 2), cache, 0)
            before = sfi_compile.stats()
            out = [LLAMA.call(forward, fed[:, :1].clone(), cache, 0)]
            assert kind_since(before) == "slow"
            out += [LLAMA.call(forward, fed[:, step : step + 1].clone(), cache, 0) for step in range(1, 11)]
            results.append(torch.cat(out, 1))
    assert torch.equal(*results)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_two_conversations_taking_turns(inference: bool) -> None:
    model, _ = LLAMA.build()
    fed = prompt(2, 10, 1)
    with torch.inference_mode(inference), torch.no_grad(), eager_lowering():
        forward = compiled(model, **SMALL)
        ours, dense = ([LLAMA.cache(model, 1, 64) for _ in range(2)] for _ in range(2))
        for row in range(2):
            for cache in (ours[row], dense[row]):
                LLAMA.call(model.forward, prompt(1, 20, row), cache, 0)
        for step in range(10):
            for row in range(2):
                token = fed[row : row + 1, step : step + 1].clone()
                wanted = LLAMA.call(model.forward, token, dense[row], 0)
                torch.testing.assert_close(LLAMA.call(forward, token, ours[row], 0), wanted, rtol=1e-4, atol=1e-4)
    assert sfi_compile.stats().triggers == {"invalid": 20, "interval": 0, "boundary": 0}


def test_other_batch_sizes_and_symbolic_sizes() -> None:
    model, _ = LLAMA.build()
    with eager_lowering():
        forward = torch.compile(model.forward, backend="sfi", options=FULL, dynamic=True, fullgraph=True)
        for batch in (2, 1, 3, 2):
            ids = prompt(batch, 12, batch)
            wanted = decode(LLAMA, model, model.forward, ids, 10, 40)
            ours = decode(LLAMA, model, forward, ids, 10, 40)
            assert ours.chosen.tolist() == wanted.chosen.tolist()
            assert ours.kinds == ["slow"] + ["fast"] * 9
    assert sfi_compile.stats().graphs == 3


def test_embeddings_instead_of_tokens_leave_the_interval_alone() -> None:
    model, _ = LLAMA.build()
    embed = model.get_input_embeddings()

    def call(forward: Any, tokens: Tensor, cache: Any, position: int) -> Tensor:
        return forward(inputs_embeds=embed(tokens), use_cache=True, **{CACHE: cache}).logits

    decoder = dataclasses.replace(LLAMA, family=dataclasses.replace(LLAMA.family, call=call))
    with eager_lowering():
        options = SMALL | {"boundary_token_ids": range(128)}
        run = decode(decoder, model, compiled(model, **options), prompt(2, 20), 17, 48)
    assert run.kinds == ["fast" if step % 8 else "slow" for step in range(17)]
    assert sfi_compile.stats().triggers["boundary"] == 0


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="the model itself fails under autocast, uncompiled")
def test_autocast_is_dense_or_right() -> None:
    model, _ = LLAMA.build()
    fed = prompt(2, 6, 1)
    with torch.autocast("cpu", torch.bfloat16), eager_lowering():
        dense = decode(LLAMA, model, model.forward, prompt(2, 12), 6, 32, fed)
        ours = decode(LLAMA, model, compiled(model, **FULL), prompt(2, 12), 6, 32, fed)
    torch.testing.assert_close(ours.logits, dense.logits, rtol=0.05, atol=0.05)
    assert {r.code for r in sfi_compile.stats().rejections} <= {"dtype"}


TINY = [
    {"sink": 0, "k_head": 1, "recent": 1, "refresh_interval": 3},
    {"sink": 0, "k_head": 1, "recent": 1, "refresh_interval": 1},
    {"sink": 1, "k_head": 1, "recent": 40, "refresh_interval": 5},
    {"sink": 60, "k_head": 100, "recent": 1, "refresh_interval": 2},
]


@pytest.mark.parametrize("options", TINY, ids=lambda o: "-".join(map(str, o.values())))
def test_tiny_contexts_and_budgets(options: dict[str, int]) -> None:
    model = llama(6, 2)()
    with eager_lowering():
        forward = compiled(model, min_context=0, **options)
        for length in (1, 2, 3):
            run = decode(LLAMA, model, forward, prompt(2, length), 9, 16, prompt(2, 9, 1), True)
            slow = [step for step, kind in enumerate(run.kinds) if kind == "slow"]
            assert slow == list(range(0, 9, options["refresh_interval"]))
            eager = dense_steps(LLAMA, model, run, length, torch.float32)
            exact = dense_steps(LLAMA, model, run, length, torch.float64)
            assert run.logits.isfinite().all()
            assert_close_to(exact[:, slow], run.logits[:, 1:][:, slow], eager[:, slow])
    support = sfi_compile.stats().support
    assert support is None or support >= 1
    assert sfi_compile.stats().graphs == 1
