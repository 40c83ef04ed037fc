"""The options of `backend="sfi"`: what is accepted, what is refused, and what a refusal says."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfi_compile.config import OF_THE_PAPERS_SELECTOR, POSITION_BETA, PRESETS, Config, OptionError, SelectorSpec, within

WHOLE = {
    "evidence_window": 1,
    "sink": 0,
    "recent": 1,
    "k_head": 1,
    "refresh_interval": 1,
    "min_refresh_gap": 0,
    "sentence_cooldown": 0,
    "min_context": 0,
    "nms_window": 0,
}
"""Whole-number options and their least value."""
SHARES = ["alpha", "lambda_clip", "lambda_clip_multi"]
POSITIVE = ["position_power", "exclusivity_temperature"]
WEIGHTS = ["norm_weight", "norm_gamma", "position_weight", "position_eta", "nms_alpha", "exclusivity_alpha"]
REALS = SHARES + POSITIVE + WEIGHTS
OTHERS = ["preset", "policy", "boundary_token_ids", "strict", "mode", "combo_kernels", "dump"]
OF_SFI = [*REALS, "nms_window"]
"""What the paper's selector alone reads."""
FIELDS = [f.name for f in dataclasses.fields(Config)]


class Index:
    """Something with `__index__`, as integer scalars of array libraries are."""

    def __index__(self) -> int:
        return 7


def read_by_its_policy(options: dict[str, Any]) -> dict[str, Any]:
    """The same with a preset whose policy reads all of them."""
    return {"preset": "paper-speed", **options} if set(options) & set(OF_SFI) else options


def refusal(options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        Config.from_options(options)
    return str(caught.value)


def assert_refused(key: str, value: object, allowed: str) -> None:
    message = refusal(read_by_its_policy({key: value}))
    assert message.startswith("sfi: ")
    assert repr(key) in message
    assert repr(value) in message
    assert f"allowed: {allowed}" in message


def test_the_lists_above_cover_every_option() -> None:
    assert sorted([*WHOLE, *REALS, *OTHERS]) == sorted(FIELDS)


# Defaults and presets


@pytest.mark.parametrize("options", [None, {}, MappingProxyType({})])
def test_no_options_give_the_defaults(options: Any) -> None:
    assert Config.from_options(options) == Config()
    assert Config.from_options() == Config()


def test_default_values() -> None:
    config = Config()
    assert (config.preset, config.policy, config.evidence_window) == ("balanced", "reach", 1)
    assert (config.sink, config.recent, config.min_refresh_gap, config.sentence_cooldown) == (4, 160, 18, 2)
    assert (config.k_head, config.refresh_interval) == (1536, 18)
    assert (config.alpha, config.norm_weight, config.norm_gamma) == (0.5, 1.0, 0.5)
    assert (config.position_weight, config.position_power, config.position_eta) == (0.7, 1.8, 0.4)
    assert (config.nms_window, config.exclusivity_temperature) == (32, 2.0)
    assert (config.boundary_token_ids, config.min_context, config.strict, config.dump) == ((), None, False, None)
    assert math.exp(-0.9 * POSITION_BETA) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [("paper-speed", (1536, 1.0, 0.85, 0.35, 0.25, 32)), ("paper-quality", (4096, 0.5, 0.35, 0.01, 0.01, 96))],
)
def test_presets_are_the_published_settings(preset: str, numbers: tuple[float, ...]) -> None:
    config = Config.from_options({"preset": preset})
    assert config.preset == preset
    names = ("k_head", "nms_alpha", "exclusivity_alpha", "lambda_clip", "lambda_clip_multi", "refresh_interval")
    assert tuple(getattr(config, name) for name in names) == numbers
    assert (config.policy, config.evidence_window, config.recent, config.min_refresh_gap) == ("sfi", 1, 256, 16)
    assert (config.sink, config.sentence_cooldown, config.alpha, config.nms_window) == (4, 2, 0.5, 32)
    same = ("sink", "sentence_cooldown", "alpha", "nms_window")
    assert all(getattr(config, name) == getattr(Config(), name) for name in same)


def test_the_default_preset_is_the_defaults() -> None:
    assert Config.from_options({"preset": Config().preset}) == Config()
    assert Config.from_options({"preset": "balanced"}) == Config()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_explicit_options_win_over_the_preset(preset: str) -> None:
    for key, value in PRESETS[preset].items():
        other = "snapkv" if key == "policy" else value / 2 if isinstance(value, float) else value + 1
        for options in ({"preset": preset, key: other}, {key: other, "preset": preset}):
            values = dataclasses.asdict(Config.from_options(options))
            wanted = {**dataclasses.asdict(Config.from_options({"preset": preset})), key: other}
            if key == "policy":  # it asks for as many queries as it wants, and no more
                wanted["evidence_window"] = 32
            assert values == wanted


def test_nothing_is_longer_than_the_cache() -> None:
    config = within(Config.from_options({"evidence_window": 10**7, "recent": 10**6}), 512)
    assert (config.evidence_window, config.recent, config.sink) == (512, 512, 4)


def test_balanced_is_what_was_measured() -> None:
    config = Config.from_options({"preset": "balanced"})
    assert (config.policy, config.evidence_window, config.recent) == ("reach", 1, 160)
    assert (config.refresh_interval, config.min_refresh_gap, config.k_head) == (18, 18, 1536)


@pytest.mark.parametrize("preset", ["paper", "Paper-Speed", "", None, 3, ["paper-speed"], {}, True])
def test_unknown_presets_are_refused(preset: object) -> None:
    assert_refused("preset", preset, "one of 'balanced', 'paper-speed', 'paper-quality'")


# Options that one policy alone reads


def test_the_options_of_the_papers_selector_are_known() -> None:
    assert sorted(OF_SFI) == sorted(OF_THE_PAPERS_SELECTOR)


@pytest.mark.parametrize("key", OF_SFI)
def test_an_option_of_the_papers_selector_is_refused_with_another_policy(key: str) -> None:
    """Also where it says what counts anyway, and whatever preset the policy differs from."""
    value = getattr(Config(), key)
    for options in ({}, {"preset": "balanced"}, {"policy": "topk"}, {"preset": "paper-speed", "policy": "topk"}):
        message = refusal({**options, key: value})
        allowed = f"with policy 'sfi' only, and the policy is {options.get('policy', 'reach')!r}"
        assert message == f"sfi: option {key!r} is {value!r}; allowed: {allowed}"
    assert "the policy is 'reach(ahead=3)'" in refusal({"policy": "reach(ahead=3)", key: value})


@pytest.mark.parametrize("key", OF_SFI)
@pytest.mark.parametrize("chosen", [{"preset": "paper-speed"}, {"preset": "paper-quality"}, {"policy": "sfi"}])
def test_an_option_of_the_papers_selector_is_accepted_with_its_policy(key: str, chosen: dict[str, str]) -> None:
    config = Config.from_options({**chosen, key: 1})
    assert config.policy == "sfi"
    assert getattr(config, key) == 1
    assert getattr(config.selector(), key) == 1


def test_what_a_preset_says_of_the_papers_selector_is_no_request() -> None:
    """Another policy may be tried beside a preset, which the preset's own numbers do not hinder."""
    config = Config.from_options({"preset": "paper-speed", "policy": "topk"})
    assert (config.policy, config.recent, config.refresh_interval) == ("topk", 256, 32)


def test_a_bad_value_is_told_before_the_policy_that_would_not_read_it() -> None:
    assert "allowed: a number >= 0 and <= 1" in refusal({"alpha": 2})


# Unknown keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sinks", "sink"),
        ("khead", "k_head"),
        ("refresh_intervall", "refresh_interval"),
        ("boundary_tokens_ids", "boundary_token_ids"),
        ("lambda_clip_mult", "lambda_clip_multi"),
        ("Strict", "strict"),
    ],
)
def test_an_unknown_key_names_the_closest_options(key: str, meant: str) -> None:
    message = refusal({"sink": 4, key: 1})
    assert message.startswith(f"sfi: unknown option {key!r}; did you mean ")
    assert repr(meant) in message


@pytest.mark.parametrize("key", ["zzzz", "", 3, None, ()])
def test_a_key_like_no_other_names_every_option(key: object) -> None:
    message = refusal({key: 1})
    assert message == f"sfi: unknown option {key!r}; allowed: {', '.join(FIELDS)}"


def test_an_unknown_key_is_found_before_a_wrong_value() -> None:
    assert "unknown option 'sinkk'" in refusal({"sink": -1, "sinkk": 2, "preset": "none"})


# Values


@pytest.mark.parametrize("key", WHOLE)
def test_whole_numbers(key: str) -> None:
    allowed = f"a whole number >= {WHOLE[key]}"
    for good in (WHOLE[key], WHOLE[key] + 1, 10**6, Index()):
        found = getattr(Config.from_options(read_by_its_policy({key: good})), key)
        assert type(found) is int
        assert found == (7 if isinstance(good, Index) else good)
    for bad in (WHOLE[key] - 1, -5, 1.0, 2.5, math.nan, math.inf, "4", b"4", True, False, [4], (4,), 4j):
        assert_refused(key, bad, allowed)


@pytest.mark.parametrize("key", REALS)
def test_real_numbers(key: str) -> None:
    low = "> 0" if key in POSITIVE else ">= 0"
    allowed = f"a number {low}" + (" and <= 1" if key in SHARES else "")
    edges = {"low": 0, "high": 1 if key in SHARES else 1e30}
    for good in (0.25, 1, edges["high"], *([] if key in POSITIVE else [0, 0.0])):
        found = getattr(Config.from_options(read_by_its_policy({key: good})), key)
        assert type(found) is float
        assert found == good
    bad: list[object] = [-0.1, -1, math.nan, math.inf, -math.inf, "0.5", True, False, None, [0.5], 0.5j]
    bad += [0, 0.0] if key in POSITIVE else []
    bad += [1.0001, 2] if key in SHARES else []
    for value in bad:
        assert_refused(key, value, allowed)


@pytest.mark.parametrize("key", [key for key in WHOLE if key != "min_context"])
def test_none_is_no_whole_number(key: str) -> None:
    assert_refused(key, None, f"a whole number >= {WHOLE[key]}")


def test_min_context_may_be_none() -> None:
    assert Config.from_options({"min_context": None}).min_context is None
    assert Config.from_options({"min_context": 0}).min_context == 0
    assert_refused("min_context", -1, "a whole number >= 0, or None")


def test_strict_is_a_flag() -> None:
    assert Config.from_options({"strict": True}).strict is True
    for bad in (0, 1, "yes", None, 1.0):
        assert_refused("strict", bad, "True or False")


def test_mode_is_a_string() -> None:
    assert Config().mode is None
    assert Config.from_options({"mode": None}).mode is None
    assert Config.from_options({"mode": "reduce-overhead"}).mode == "reduce-overhead"
    for bad in (3, True, b"default", ["default"]):
        assert_refused("mode", bad, "a string, or None")


def test_dump_is_a_folder_path() -> None:
    assert Config.from_options({"dump": "graphs"}).dump == "graphs"
    assert Config.from_options({"dump": Path("some") / "graphs"}).dump == str(Path("some") / "graphs")
    assert Config.from_options({"dump": None}).dump is None
    for bad in ("", 3, True, b"graphs", ["graphs"]):
        assert_refused("dump", bad, "a folder path, or None")


def test_boundary_token_ids_are_a_sorted_set() -> None:
    for given_ids in ([9, 3, 9, 0], (0, 3, 9), {3, 9, 0}, iter([3, 0, 9]), {0: "a", 3: "b", 9: "c"}):
        assert Config.from_options({"boundary_token_ids": given_ids}).boundary_token_ids == (0, 3, 9)
    assert Config.from_options({"boundary_token_ids": [Index()]}).boundary_token_ids == (7,)
    assert Config.from_options({"boundary_token_ids": []}).boundary_token_ids == ()


@pytest.mark.parametrize("bad", ["13", b"13", 13, None, True, torch.tensor([3]), torch.tensor([3]).numpy()])
def test_boundary_token_ids_must_be_an_iterable(bad: object) -> None:
    assert_refused("boundary_token_ids", bad, "an iterable of token ids (whole numbers >= 0)")


@pytest.mark.parametrize("bad", [-1, 1.0, "13", None, True])
def test_a_bad_boundary_token_id_is_named(bad: object) -> None:
    message = refusal({"boundary_token_ids": [13, bad]})
    assert "'boundary_token_ids'" in message
    assert f" is {bad!r};" in message
    assert "whole numbers >= 0" in message


# What comes out


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_config_is_a_hashable_constant(preset: str) -> None:
    options = {"preset": preset, "boundary_token_ids": [5, 1], "dump": Path("x")}
    first, second = Config.from_options(options), Config.from_options(options)
    assert first == second
    assert hash(first) == hash(second)
    assert first != Config.from_options({**options, "sink": 5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.sink = 3  # type: ignore[misc]
    assert options["boundary_token_ids"] == [5, 1]


def test_a_config_is_accepted_again_as_options() -> None:
    config = Config.from_options({"preset": "paper-quality", "sink": 0, "min_context": 5, "dump": "d", "alpha": 1})
    assert Config.from_options(dataclasses.asdict(config)) == config


def test_memory_slots_hold_the_support_at_its_longest() -> None:
    config = Config.from_options({"sink": 3, "k_head": 50, "recent": 20, "refresh_interval": 7})
    assert config.memory_slots == 3 + 50 + 20 + 7


def test_an_option_error_is_a_value_error() -> None:
    assert issubclass(OptionError, ValueError)


# The selector's part


def test_the_selector_spec_carries_the_options() -> None:
    config = Config.from_options({"preset": "paper-quality", "k_head": 9, "position_eta": 0.125})
    spec = config.selector()
    assert {f.name for f in dataclasses.fields(spec)} <= set(FIELDS)
    assert all(getattr(config, name) == value for name, value in dataclasses.asdict(spec).items())
    assert (spec.k_head, spec.position_eta, spec.nms_alpha) == (9, 0.125, 0.5)


kinds: dict[Any, Any] = {
    "int": st.integers(0, 10**9),
    "float": st.floats(0, 1e12),
    "str": st.sampled_from(["sfi", "random(seed=-2)"]),
}
specs = st.builds(SelectorSpec, **{f.name: kinds[f.type] for f in dataclasses.fields(SelectorSpec)})


@given(specs)
def test_a_selector_spec_survives_its_text(spec: SelectorSpec) -> None:
    text = spec.to_text()
    assert "\n" not in text
    again = SelectorSpec.from_text(text)
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.to_text() == text
    assert [type(value) for value in dataclasses.astuple(again)] == [type(value) for value in dataclasses.astuple(spec)]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_presets_selector_spec_survives_its_text(preset: str) -> None:
    spec = Config.from_options({"preset": preset}).selector()
    assert SelectorSpec.from_text(spec.to_text()) == spec
    assert spec.to_text().startswith(f"k_head={spec.k_head} sink=4 recent={spec.recent} alpha=0.5 ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k_head=1536 ", ""),
        ("k_head=1536", "k_heads=1536"),
        ("k_head=1536", "k_head=1536 extra=1"),
        ("k_head=1536", "k_head"),
        ("k_head=1536", "k_head=1536.0"),
        ("k_head=1536", "k_head=many"),
        ("alpha=0.5", "alpha=half"),
    ],
)
def test_text_that_is_no_selector_spec_is_refused(old: str, new: str) -> None:
    text = Config().selector().to_text()
    assert old in text
    with pytest.raises(ValueError):
        SelectorSpec.from_text(text.replace(old, new, 1))
    with pytest.raises(ValueError):
        SelectorSpec.from_text("")


def test_a_policy_of_ones_own_may_read_the_papers_options() -> None:
    from sfi_compile import policies

    @policies.register
    @dataclasses.dataclass(frozen=True)
    class Own(policies.Policy):
        name = "own_for_config"

    try:
        assert Config.from_options({"policy": "own_for_config", "position_weight": 2.0}).position_weight == 2.0
    finally:
        policies.base._known.pop("own_for_config")
        policies.parse.cache_clear()
