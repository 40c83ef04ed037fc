"""`generate()` on an accelerated model: every way of decoding that works without the backend works with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sfi_compile
from tests.decoders import BY_NAME
from tests.harness import FULL, SMALL, dynamo_graphs, eager_lowering, prompt

NEW = 40


def fresh() -> Any:
    """The same small Llama every time."""
    return BY_NAME["llama"].build()[0]


def padded(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left: ids and attention mask, int64 [batch, longest]."""
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    """New tokens only, int64 [batch, NEW]."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"} | how
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


def dense(ids: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    """The same without the backend."""
    return generate(fresh(), ids, mask, disable_compile=True, **how)


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_is_dense_at_full_budget(batch: int) -> None:
    ids = prompt(batch, 17)
    with eager_lowering():
        ours = generate(sfi_compile.accelerate(fresh(), **FULL), ids)
    assert ours.tolist() == dense(ids).tolist()
    assert sfi_compile.stats().fast_steps > NEW // 2
    assert sfi_compile.stats().rejections == ()


def test_sampling_with_one_seed_is_dense_at_full_budget() -> None:
    ids, mask = padded((17, 11))
    how = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
    torch.manual_seed(7)
    wanted = dense(ids, mask, **how)
    torch.manual_seed(7)
    with eager_lowering():
        ours = generate(sfi_compile.accelerate(fresh(), **FULL), ids, mask, **how)
    assert ours.tolist() == wanted.tolist()
    assert sfi_compile.stats().fast_steps > NEW // 2


def test_a_prompt_of_one_token_is_no_rejection() -> None:
    # The cache is made inside the compiled first step.
    ids = prompt(1, 1)
    with eager_lowering():
        ours = generate(sfi_compile.accelerate(fresh(), strict=True, **FULL), ids)
    assert ours.tolist() == dense(ids).tolist()
    assert sfi_compile.stats().rejections == ()
    assert sfi_compile.stats().fast_steps > NEW // 2


def test_other_options_later_replace_the_first() -> None:
    ids = prompt(1, 40)
    model = fresh()
    with eager_lowering():
        sfi_compile.accelerate(model, **SMALL)
        small = generate(model, ids)
        sfi_compile.accelerate(model, **FULL)
        full = generate(model, ids)
    assert small.tolist() != full.tolist() == dense(ids).tolist()


@pytest.mark.parametrize("preset", ["balanced", "paper-speed"])
def test_a_row_alone_is_the_row_in_a_batch(preset: str) -> None:
    lengths = (21, 9, 15)
    ids, mask = padded(lengths)
    with eager_lowering():
        model = sfi_compile.accelerate(fresh(), **SMALL, preset=preset, boundary_token_ids=range(3, 40, 5))
        together = generate(model, ids, mask)
        for row, length in enumerate(lengths):
            alone = generate(model, ids[row : row + 1, -length:])
            assert alone[0].tolist() == together[row].tolist()
    assert sfi_compile.stats().triggers["boundary"] > 0
    assert sfi_compile.stats().fast_steps > NEW


@pytest.mark.parametrize("way", ["accelerate", "model.compile"])
def test_later_calls_compile_nothing(way: str) -> None:
    model = fresh()
    with eager_lowering():
        if way == "accelerate":
            sfi_compile.accelerate(model, **FULL)
        else:
            model.compile(backend="sfi", options=FULL)
        settings = {"max_new_tokens": 12, "disable_compile": True}
        results = [generate(model, prompt(2, 13), **settings)]
        after_one = sfi_compile.stats().graphs, dynamo_graphs()
        results += [generate(model, prompt(2, 13), **settings) for _ in range(2)]
    assert after_one[0] == 1
    assert (sfi_compile.stats().graphs, dynamo_graphs()) == after_one
    assert results[0].tolist() == results[1].tolist() == results[2].tolist()
    assert sfi_compile.stats().slow_steps + sfi_compile.stats().fast_steps == 3 * 11


def test_other_prompt_lengths_in_one_cache_length_use_the_same_decode_graph() -> None:
    with eager_lowering():
        model = sfi_compile.accelerate(fresh(), **FULL)
        for length in (13, 8, 30, 21):
            ids = prompt(1, length, length)
            ours = generate(model, ids, max_new_tokens=64 - length)
            assert ours.tolist() == dense(ids, max_new_tokens=64 - length).tolist()
    assert sfi_compile.stats().graphs == 1


@pytest.mark.parametrize("options", [FULL, SMALL], ids=["full", "small"])
def test_beam_search_is_dense_beam_search(options: dict[str, Any]) -> None:
    ids, mask = padded((15, 10))
    how = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 24}
    with eager_lowering():
        ours = generate(sfi_compile.accelerate(fresh(), **options), ids, mask, **how)
    assert ours.tolist() == dense(ids, mask, **how).tolist()
    stats = sfi_compile.stats()
    assert stats.graphs == 1
    assert stats.slow_steps + stats.fast_steps == 23


def test_two_prompts_on_one_model_do_not_share_a_memory() -> None:
    first, second = prompt(1, 20, 1), prompt(1, 20, 2)
    with eager_lowering():
        one = generate(sfi_compile.accelerate(fresh(), **SMALL), second)
        model = sfi_compile.accelerate(fresh(), **SMALL)
        generate(model, first)
        assert generate(model, second).tolist() == one.tolist()


def test_compiling_the_module_around_generate_never_runs_the_backend() -> None:
    # generate() belongs to the inner model; `accelerate` and `model.compile` are the ways that work.
    ids = prompt(1, 9)
    with eager_lowering():
        wrapped = torch.compile(fresh(), backend="sfi", options=FULL)
        ours = generate(wrapped, ids, max_new_tokens=8)
    assert ours.tolist() == dense(ids, max_new_tokens=8).tolist()
    stats = sfi_compile.stats()
    assert (stats.graphs, stats.slow_steps, stats.fast_steps) == (0, 0, 0)


def test_accelerate_takes_boundaries_from_a_tokenizer_and_leaves_a_usable_model() -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {".": 5, "word": 6, "\n": 7}

        def convert_ids_to_tokens(self, token: int) -> str:
            return {5: ".", 6: "word", 7: "\n"}[token]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(self.convert_ids_to_tokens, ids))

        def __len__(self) -> int:
            return 8

    model = fresh().train()
    same = sfi_compile.accelerate(model, Tokenizer(), **SMALL)
    assert same is model
    assert not model.training
    assert model.generation_config.cache_implementation == "static"
    with pytest.raises(sfi_compile.OptionError, match="k_heed"):
        sfi_compile.accelerate(model, k_heed=3)
    with pytest.raises(TypeError, match="int"):
        sfi_compile.accelerate(3)


@pytest.mark.slow
def test_inductor_generates_the_same_tokens() -> None:
    ids, mask = padded((17, 11))
    model = sfi_compile.accelerate(fresh(), **FULL)
    assert generate(model, ids, mask).tolist() == dense(ids, mask).tolist()
    assert sfi_compile.stats().fast_steps > NEW // 2
    assert isinstance(model, transformers.PreTrainedModel)
