"""Every mode of `generate()` that takes a static cache, through `accelerate` and through `model.compile`."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sfi_compile
from sfi_compile.acceleration import STEP_TOKENS
from tests.decoders import BY_NAME, CACHE
from tests.harness import FULL, SMALL, dynamo_graphs, eager_lowering, prompt, watch

NEW = 24
TURN = 3
"""Tokens that a second turn adds."""
CROPS = hasattr(transformers.cache_utils.StaticLayer, "crop")


@pytest.fixture(autouse=True)
def _drafts_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adapts how sure a draft must be, and so its length, where scikit-learn happens to be installed."""
    monkeypatch.setattr("transformers.generation.candidate_generator.is_sklearn_available", lambda: False)


def fresh() -> Any:
    """The same small Llama every time."""
    return BY_NAME["llama"].build()[0]


def draft() -> Any:
    """A draft model that is right about some tokens."""
    model = fresh()
    torch.manual_seed(3)
    for weight in model.parameters():
        weight.add_(0.02 * torch.randn_like(weight))
    return model


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to call `generate`."""

    name: str
    settings: dict[str, Any]
    lengths: tuple[int, ...] = (19,)
    """Of the prompts, padded on the left."""
    assistant: bool = False
    """Whether a draft model helps."""
    fast: bool = True
    """Whether there are fast steps: a reordered beam's next step is slow, and drafts make steps of several tokens."""
    drafts: bool = False
    """Steps of several tokens, of which some are taken back."""
    graphs: int = 1
    """Decode graphs: steps of one fixed number of several tokens have one of their own."""
    numbers: bool = False
    """Steps of more than one number of several tokens, which Dynamo makes symbolic."""

    def inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """Ids and mask, int64 [batch, longest]; the second half of a prompt repeats the first."""
        longest = max(self.lengths)
        ids = prompt(len(self.lengths), longest, seed)
        ids[:, longest // 2 :] = ids[:, : longest - longest // 2].clone()
        mask = torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]
        return {"input_ids": ids * mask, "attention_mask": mask.long()}

    def run(self, model: Any, seed: int = 0, **how: Any) -> Tensor:
        """Prompt and new tokens."""
        torch.manual_seed(7)
        settings = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True}
        settings |= {"cache_implementation": "static"} | ({"assistant_model": draft()} if self.assistant else {})
        return model.generate(**self.inputs(seed), **(settings | self.settings | how))


_SAMPLE = {"do_sample": True, "temperature": 0.9, "top_k": 20}
_MODES = (
    Mode("greedy", {}),
    Mode("left-padding", {}, (19, 7, 12)),
    Mode("sampling", _SAMPLE, (19, 7)),
    Mode("several-returns", _SAMPLE | {"num_return_sequences": 3}),
    Mode("beam", {"num_beams": 3}, (19, 7), fast=False),
    Mode("beam-sampling", _SAMPLE | {"num_beams": 3, "num_return_sequences": 2}, fast=False),
    Mode("prompt-in-chunks", {"prefill_chunk_size": 7}, graphs=2, numbers=True),
    Mode("repetition-penalty", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
    Mode("prompt-lookup", {"prompt_lookup_num_tokens": 4, "max_cache_len": 64}, fast=False, drafts=True, numbers=True),
    Mode("assisted", {}, assistant=True, fast=False, drafts=True, graphs=2),
)
MODES = {mode.name: mode for mode in _MODES}


def each_of(*names: str) -> pytest.MarkDecorator:
    """Run a test in each of these modes."""
    without = "static caches do not crop"
    return pytest.mark.parametrize(
        "mode",
        [
            pytest.param(MODES[n], id=n, marks=pytest.mark.skipif(MODES[n].drafts and not CROPS, reason=without))
            for n in names
        ],
    )


@each_of(*MODES)
def test_accelerated_it_is_dense_at_full_budget(mode: Mode) -> None:
    wanted = mode.run(fresh())
    with eager_lowering():
        ours = mode.run(sfi_compile.accelerate(fresh(), **FULL))
    assert ours.tolist() == wanted.tolist()
    assert mode.graphs <= sfi_compile.stats().graphs <= max(1, 2 * mode.graphs - 1)
    assert [r.code for r in sfi_compile.stats().rejections] == ["symbolic-tokens"] * mode.numbers


@each_of("left-padding", "sampling", "beam", "prompt-in-chunks", "prompt-lookup", "assisted")
def test_compiled_with_a_small_memory_all_but_fast_steps_are_dense(mode: Mode) -> None:
    model = fresh()
    with eager_lowering():
        model.compile(backend="sfi", options=SMALL)
        calls = watch(model)
        mode.run(model)
    kinds = [kind for kind, tokens in calls if tokens == 1]
    assert "dense" not in kinds
    several = [kind for kind, tokens in calls if tokens > 1]
    assert several[0] == "dense" or calls[0][1] <= STEP_TOKENS, "the prompt is no decode step"
    assert ("slow" in several) == (mode.graphs > 1)
    assert not mode.fast or kinds.count("fast") > NEW // 2
    if mode.drafts:
        verified = sum(tokens for _, tokens in calls[1:])
        assert len(calls) < NEW < verified, "no draft was accepted, or none rejected"


def test_guidance_decodes_two_caches_in_turns() -> None:
    mode = Mode("guidance", {"guidance_scale": 1.5})  # the second one grows: transformers makes it
    wanted = mode.run(fresh())
    with eager_lowering():
        ours = mode.run(sfi_compile.accelerate(fresh(), **FULL))
    assert ours.tolist() == wanted.tolist()
    stats = sfi_compile.stats()
    assert stats.graphs == 1
    assert stats.fast_steps > NEW // 2
    assert {r.code for r in stats.rejections} == {"growing-cache"}
    assert all('cache_implementation="static"' in r.hint for r in stats.rejections)


def test_an_encoder_decoder() -> None:
    def generate() -> list[list[int]]:
        ids = prompt(2, 20)
        how = {"max_new_tokens": NEW, "decoder_start_token_id": 1, "cache_implementation": "static"}
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **how).tolist()

    model, _ = BY_NAME["bart"].build()
    wanted = generate()
    with eager_lowering():
        sfi_compile.accelerate(model, **FULL)
        assert generate() == wanted
        assert generate() == wanted
    assert dynamo_graphs() == sfi_compile.stats().graphs == 1
    assert sfi_compile.stats().fast_steps > NEW


def test_a_streamer_sees_every_token() -> None:
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    with eager_lowering():
        ours = MODES["greedy"].run(sfi_compile.accelerate(fresh(), **SMALL), streamer=streamer)
    assert streamer.ended
    assert streamer.seen == ours[0].tolist()
    assert sfi_compile.stats().fast_steps > NEW // 2


def crop(cache: Any, text: Tensor) -> tuple[Any, Tensor]:
    cache.crop(-5)
    return cache, text[:, :-5]


def reset(cache: Any, text: Tensor) -> tuple[Any, Tensor]:
    cache.reset()
    return cache, another_text(text)


def another(cache: Any, text: Tensor) -> tuple[Any, Tensor]:
    return transformers.StaticCache(config=fresh().config, max_cache_len=96), another_text(text)


def longer(cache: Any, text: Tensor) -> tuple[Any, Tensor]:
    return transformers.StaticCache(config=fresh().config, max_cache_len=128), text


def another_text(text: Tensor) -> Tensor:
    """As long as what the cache held of `text`, once the next turn is on it: the position alone tells no difference."""
    return prompt(1, text.shape[1] - 1 - TURN, 5)


BETWEEN: dict[str, Callable[[Any, Tensor], tuple[Any, Tensor]]] = {
    "another-turn": lambda cache, text: (cache, text),
    "reset": reset,
    "another": another,
    "crop": crop,
    "longer": longer,
}


@pytest.mark.parametrize(
    ("between", "turn"),
    [(between, TURN) for between in BETWEEN if CROPS or between != "crop"] + [("another-turn", STEP_TOKENS + 4)],
)
def test_turns_on_a_cache_of_ones_own(between: str, turn: int) -> None:
    def talk(model: Any) -> list[int]:
        cache, text = transformers.StaticCache(config=model.config, max_cache_len=96), prompt(1, 19)
        for seed in (1, 2):
            how = {CACHE: cache, "cache_implementation": None, "max_new_tokens": NEW, "do_sample": False}
            text = model.generate(text, attention_mask=torch.ones_like(text), **how)
            cache, text = BETWEEN[between](cache, text)
            text = torch.cat([text, prompt(1, turn, seed)], 1)
        return text[0].tolist()

    wanted = talk(fresh())
    with eager_lowering():
        model = sfi_compile.accelerate(fresh(), **FULL)
        calls = watch(model)
        assert talk(model) == wanted
    assert sfi_compile.stats().fast_steps > NEW
    assert sfi_compile.stats().graphs == (2 if between == "longer" else 1)
    after_prompt = [second for first, second in itertools.pairwise(calls) if first[1] > 1]
    assert after_prompt == [("slow", 1)] * 2, "a memory outlived its turn"


@each_of("greedy", "left-padding", "beam")
def test_a_fixed_cache_length_makes_one_graph_for_all_prompts(mode: Mode) -> None:
    with eager_lowering():
        model = sfi_compile.accelerate(fresh(), max_cache_len=64, **FULL)
        for seed, more in enumerate((0, -4, 9, 0)):
            each = dataclasses.replace(mode, lengths=tuple(n + more for n in mode.lengths))
            assert each.run(model, seed).tolist() == each.run(fresh(), seed).tolist()
    assert dynamo_graphs() == sfi_compile.stats().graphs == 1


def test_a_request_for_more_than_the_fixed_cache_length() -> None:
    def length(new: int) -> int:
        ids = prompt(1, 10)
        how = {"max_new_tokens": new, "return_dict_in_generate": True}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **how)
        return int(found[CACHE].layers[0].keys.shape[2])

    model = fresh()
    with eager_lowering():
        sfi_compile.accelerate(model, max_cache_len=24, **FULL)
        assert [length(new) for new in (4, 30, 4)] == [24, 39, 39]
        assert sfi_compile.stats().graphs == 2
        sfi_compile.accelerate(model, max_cache_len=24, **FULL)
        assert length(4) == 24


@pytest.mark.parametrize("value", [0, -3, True, 2.5, "many"])
def test_a_bad_cache_length_is_named_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(sfi_compile.OptionError, match=rf"max_cache_len is {value!r}; allowed: a whole number >= 1"):
        sfi_compile.accelerate(fresh(), max_cache_len=value)
    with pytest.raises(sfi_compile.OptionError, match=r"max_cache_len is .*, but Linear has no generate\(\)"):
        sfi_compile.accelerate(torch.nn.Linear(2, 2), max_cache_len=value)


def test_only_steps_are_compiled() -> None:
    model = sfi_compile.accelerate(fresh(), **FULL)
    cache = {CACHE: transformers.StaticCache(config=model.config, max_cache_len=64)}
    with torch.no_grad(), eager_lowering():
        model(prompt(1, 3), **cache)  # allocates the cache
        model(prompt(1, STEP_TOKENS + 1), **cache)
        model(inputs_embeds=torch.randn(1, STEP_TOKENS + 1, 64), **cache)
        assert dynamo_graphs() == 0
        model(prompt(1, STEP_TOKENS), **cache)
        assert (dynamo_graphs(), sfi_compile.stats().graphs) == (1, 1)
        model(input_ids=prompt(1, 1), **cache)
        assert (dynamo_graphs(), sfi_compile.stats().graphs) == (2, 2)


def test_accelerated_models_do_not_share_a_recompile_limit() -> None:
    with eager_lowering(), torch._dynamo.config.patch(recompile_limit=2):
        models = [sfi_compile.accelerate(fresh(), **FULL) for _ in range(3)]
        for model in models:
            before = sfi_compile.stats().fast_steps
            MODES["greedy"].run(model)
            assert sfi_compile.stats().fast_steps > before + NEW // 2
    assert dynamo_graphs() == 3


def test_a_copy_of_an_accelerated_model_is_not_compiled() -> None:
    with eager_lowering():
        model = sfi_compile.accelerate(fresh(), **FULL)
        twin = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
        assert MODES["greedy"].run(twin).tolist() == MODES["greedy"].run(fresh()).tolist()
    assert dynamo_graphs() == 0
