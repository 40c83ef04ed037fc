"""The options of `backend="sfi"`: one frozen dataclass, validated once, read by everything else.

This room imports nothing of ours and nothing of torch, but for the names of policies and modes, when one is given.
`Config.from_options` is the only way in from user input; every error names the option, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

POSITION_BETA = -math.log(0.6) / 0.9
"""Decay of the position prior (dimensionless); published constant, not an option."""

PRESETS: dict[str, dict[str, Any]] = {
    "balanced": {
        "policy": "reach",
        "recent": 160,
        "refresh_interval": 18,
        "min_refresh_gap": 18,
    },
    "paper-speed": {
        "policy": "sfi",
        "k_head": 1536,
        "recent": 256,
        "nms_alpha": 1.0,
        "exclusivity_alpha": 0.85,
        "lambda_clip": 0.35,
        "lambda_clip_multi": 0.25,
        "refresh_interval": 32,
        "min_refresh_gap": 16,
    },
    "paper-quality": {
        "policy": "sfi",
        "k_head": 4096,
        "recent": 256,
        "nms_alpha": 0.5,
        "exclusivity_alpha": 0.35,
        "lambda_clip": 0.01,
        "lambda_clip_multi": 0.01,
        "refresh_interval": 96,
        "min_refresh_gap": 16,
    },
}
"""One chosen by measurement on a small model (docs/results/fidelity.md), which is the default, and the two published
settings (arXiv 2603.12038); explicit options win over them."""


class OptionError(ValueError):
    """An option of `backend="sfi"` that does not exist, or a value that it cannot take."""


@dataclasses.dataclass(frozen=True)
class SelectorSpec:
    """The selector's numbers (docs/design.md, "Selector"), hashable and printable so that graphs can carry them."""

    k_head: int
    sink: int
    recent: int
    alpha: float
    norm_weight: float
    norm_gamma: float
    position_weight: float
    position_power: float
    position_eta: float
    lambda_clip: float
    lambda_clip_multi: float
    nms_window: int
    nms_alpha: float
    exclusivity_alpha: float
    exclusivity_temperature: float
    policy: str

    def to_text(self) -> str:
        """One line, `name=value` pairs in field order; `from_text` reads it back exactly."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))

    @classmethod
    def from_text(cls, text: str) -> SelectorSpec:
        """The spec that `to_text` wrote. Raises ValueError on anything else."""
        items = [item.partition("=")[::2] for item in text.split()]
        pairs = dict(items)
        names = [f.name for f in dataclasses.fields(cls)]
        if sorted(name for name, _ in items) != sorted(names):
            raise ValueError(f"not a selector spec: {text!r}; allowed: {' '.join(f'{n}=…' for n in names)}")
        values: dict[str, Any] = {
            f.name: {"int": int, "float": float, "str": str}[str(f.type)](pairs[f.name])
            for f in dataclasses.fields(cls)
        }
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a user can set. Token counts are positions of the KV cache; weights are dimensionless."""

    preset: str = "balanced"
    """Named group of defaults: one of `PRESETS`."""
    policy: str = "reach"
    """What a refresh selects: a name of `sfi_compile.policies`, `name(field=value)`, or a policy itself."""
    sink: int = 4
    """First valid tokens of a row that every support keeps (>= 0)."""
    recent: int = 160
    """Tokens up to the refresh position that every support keeps; the segment then grows (>= 1)."""
    k_head: int = 1536
    """Most tokens chosen per KV head at a refresh (>= 1)."""
    refresh_interval: int = 18
    """A row is slow at the latest this many tokens after its last refresh (>= 1)."""
    min_refresh_gap: int = 18
    """A boundary token makes a row slow only this many tokens after its last refresh (>= 0)."""
    sentence_cooldown: int = 2
    """Steps after a boundary refresh in which further boundary tokens are ignored (>= 0)."""
    boundary_token_ids: tuple[int, ...] = ()
    """Token ids that end a sentence or clause; empty: the interval alone decides. See `sentence_boundaries`."""
    evidence_window: int = 1
    """Queries of the last so many tokens that a refresh asks what they attend to (>= 1); a policy may ask for more.
    Under a mask that adds numbers, the step's own queries alone are asked. Policies that go by a history alone
    (`reach`, `h2o`) make nothing of it."""
    min_context: int | None = None
    """Context (tokens) from which rows keep a memory. None: the larger of the memory and the cost model's break-even;
    0: always, also when the memory holds everything."""
    strict: bool = False
    """Raise `RejectedSitesError` if any attention site of a decode graph must stay dense."""
    mode: str | None = None
    """Inductor mode, for use together with other options (`torch.compile` takes `mode=` or `options=`, not both)."""
    combo_kernels: bool = True
    """On a GPU, let Inductor make one kernel of several that do not depend on each other (its own default: no)."""
    dump: str | None = None
    """Folder to write the graph after each pass into; a graph that is compiled later overwrites an earlier one."""
    alpha: float = 0.5
    """Exponent of the power mean over evidence rows; 0 is the geometric mean (0 <= alpha <= 1)."""
    norm_weight: float = 1.0
    """Weight of the key-norm prior (>= 0)."""
    norm_gamma: float = 0.5
    """Exponent of the key norm in the prior (>= 0)."""
    position_weight: float = 0.7
    """Weight of the position prior (>= 0)."""
    position_power: float = 1.8
    """Exponent of the relative position (> 0)."""
    position_eta: float = 0.4
    """Weight of log(1 - u) in the position prior (>= 0)."""
    lambda_clip: float = 0.35
    """Largest share of the prior when there is one evidence row (0..1)."""
    lambda_clip_multi: float = 0.25
    """Largest share of the prior when there are several evidence rows (0..1)."""
    nms_window: int = 32
    """Width in tokens of the soft non-maximum suppression (>= 0; 0 switches it off)."""
    nms_alpha: float = 1.0
    """Strength of the soft non-maximum suppression (>= 0)."""
    exclusivity_alpha: float = 0.85
    """Strength of the cross-head exclusivity (>= 0)."""
    exclusivity_temperature: float = 2.0
    """Temperature of the cross-head softmax (> 0)."""

    @property
    def memory_slots(self) -> int:
        """Slots of one packed memory: sink, selected, and the recent segment at its longest. Under a policy that gives
        sites budgets of their own, their mean."""
        return self.sink + self.k_head + self.recent + self.refresh_interval

    def selector(self) -> SelectorSpec:
        """The part of the options that the selector reads."""
        return SelectorSpec(**{f.name: getattr(self, f.name) for f in dataclasses.fields(SelectorSpec)})

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> Config:
        """Validate `torch.compile(..., options=...)`.

        Raises:
            OptionError: unknown key (with the closest names), wrong type, or a value out of range.
        """
        given = dict(options or {})
        names = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=3)
                hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"allowed: {', '.join(names)}"
                raise OptionError(f"sfi: unknown option {key!r}; {hint}")
        preset = given.get("preset", cls.preset)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise _refuse("preset", preset, "one of " + ", ".join(map(repr, PRESETS)))
        merged = {**PRESETS[preset], **given}
        config = cls(**{key: _CHECKS[key](key, value) for key, value in merged.items()})
        policy = _policy_of(config.policy)
        for key in given:
            if key in OF_THE_PAPERS_SELECTOR and not policy.reads_spec:
                raise _refuse(key, given[key], f"with policy 'sfi' only, and the policy is {config.policy!r}")
        config = dataclasses.replace(config, evidence_window=max(config.evidence_window, policy.window))
        if policy.reads_memory:
            # It chooses at every step.
            if given.get("refresh_interval", 1) != 1:
                raise _refuse("refresh_interval", given["refresh_interval"], f"1 with policy {config.policy!r}")
            config = dataclasses.replace(config, refresh_interval=1)
        return config


OF_THE_PAPERS_SELECTOR = {f.name for f in dataclasses.fields(SelectorSpec)} - {"k_head", "sink", "recent", "policy"}
"""Options that no policy of this package but `sfi` reads; one of a user's own may."""


def within(config: Config, context: int) -> Config:
    """The same for caches of at most `context` positions: nothing need be longer than that."""
    names = ("sink", "recent", "refresh_interval", "evidence_window")
    return dataclasses.replace(config, **{name: min(getattr(config, name), context) for name in names})


def _refuse(key: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"sfi: option {key!r} is {value!r}; allowed: {allowed}")


def _whole(low: int) -> Callable[[str, Any], int]:
    allowed = f"a whole number >= {low}"

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool):
            raise _refuse(key, value, allowed)
        try:
            number = operator.index(value)
        except TypeError:
            raise _refuse(key, value, allowed) from None
        if number < low:
            raise _refuse(key, value, allowed)
        return number

    return check


def _real(low: float, high: float = math.inf, *, open_low: bool = False) -> Callable[[str, Any], float]:
    lower = f"> {low:g}" if open_low else f">= {low:g}"
    allowed = f"a number {lower}" + ("" if math.isinf(high) else f" and <= {high:g}")

    def check(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(key, value, allowed)
        # Beyond the range of a float is out of range, not an accident.
        number = float(value) if abs(value) < 1e300 else math.inf
        if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
            raise _refuse(key, value, allowed)
        return number

    return check


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "True or False")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(key, value, "a string")
    return value


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    def inner(key: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            return check(key, value)
        except OptionError as error:
            raise OptionError(f"{error}, or None") from None

    return inner


def _folder(key: str, value: Any) -> str:
    # str() of a Path-like keeps the config hashable and printable.
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str) or not path:
        raise _refuse(key, value, "a folder path")
    return path


def _mode(key: str, value: Any) -> str:
    from sfi_compile.compat.inductor import mode_patches

    text = _text(key, value)
    try:
        mode_patches(text)
    except ValueError as error:
        raise OptionError(str(error)) from None
    return text


def _policy_of(text: str) -> Any:
    from sfi_compile import policies

    return policies.parse(text)


def _policy(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "to_text", lambda: None)()
    if not isinstance(text, str):
        raise _refuse(key, value, "a name, or a policy")
    try:
        return str(_policy_of(text).to_text())
    except ValueError as error:
        raise OptionError(f"sfi: option {key!r}: {error}") from None


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    allowed = "an iterable of token ids (whole numbers >= 0)"
    # Dynamo compares options by ==, which arrays and tensors answer element by element.
    if isinstance(value, (str, bytes)) or hasattr(value, "__array__") or not isinstance(value, Iterable):
        raise _refuse(key, value, allowed)
    one = _whole(0)
    try:
        return tuple(sorted({one(key, item) for item in value}))
    except OptionError as error:
        raise OptionError(f"{error}, in {allowed}") from None


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "preset": _text,
    "policy": _policy,
    "sink": _whole(0),
    "recent": _whole(1),
    "k_head": _whole(1),
    "refresh_interval": _whole(1),
    "min_refresh_gap": _whole(0),
    "sentence_cooldown": _whole(0),
    "boundary_token_ids": _token_ids,
    "evidence_window": _whole(1),
    "min_context": _optional(_whole(0)),
    "strict": _flag,
    "mode": _optional(_mode),
    "combo_kernels": _flag,
    "dump": _optional(_folder),
    "alpha": _real(0.0, 1.0),
    "norm_weight": _real(0.0),
    "norm_gamma": _real(0.0),
    "position_weight": _real(0.0),
    "position_power": _real(0.0, open_low=True),
    "position_eta": _real(0.0),
    "lambda_clip": _real(0.0, 1.0),
    "lambda_clip_multi": _real(0.0, 1.0),
    "nms_window": _whole(0),
    "nms_alpha": _real(0.0),
    "exclusivity_alpha": _real(0.0),
    "exclusivity_temperature": _real(0.0, open_low=True),
}
