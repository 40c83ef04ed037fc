"""`sfi generate`: one prompt decoded twice in one run, dense and with SFI, and what the backend did.

Imports the package's public names and the lab.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import sfi_compile
from sfi_compile.lab.decode import Decoder, forget_graphs, median, prefill
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import check_positions, load, static_cache
from sfi_compile.lab.progress import Progress, ignore
from sfi_compile.lab.texts import given_text, prompt_ids

BLOCK = 8
"""Decode steps that one run takes before the other does: both meet the same load of the machine."""
COMPILING_STEPS = 2
"""Decode steps behind the "compiling" spinner: the first (slow) and the first fast one."""


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """What to decode. Token counts are positions of the KV cache."""

    model: str
    prompt_file: str | None
    text: str
    context: int
    new_tokens: int
    seed: int
    dtype: torch.dtype
    device: str
    options: dict[str, Any]
    max_cache_len: int | None = None


@dataclasses.dataclass(frozen=True)
class Observer(Progress):
    """Where progress and text go; the defaults are silent."""

    text: Callable[[str], None] = ignore
    """A piece of SFI's text, as it is decoded (possibly while `busy` lasts)."""


def run_generate(settings: GenerateSettings, observer: Observer | None = None) -> dict[str, Any]:
    """Decode greedily, dense and SFI, from the same prefilled cache; keys as in docs/cli.md.

    The prompt but for its last token is prefilled in eager mode; the last token is the first one fed to the compiled
    steps, so `new_tokens` steps give `new_tokens` tokens. End-of-text tokens do not stop either run.

    Raises:
        LabError: what cannot be loaded, does not fit, or is refused by `strict=True`.
        OptionError: a bad option of the backend.
    """
    show = observer or Observer()
    sfi_compile.Config.from_options(settings.options)
    # Read the prompt before the weights: a wrong path should fail at once.
    text = given_text(settings.prompt_file, settings.text, settings.context, settings.seed)
    with show.busy(f"loading {settings.model}"):
        model, tokenizer = load(settings.model, settings.dtype, settings.device)
        ids = prompt_ids(tokenizer, text, settings.context).to(settings.device)
    longest = _cache_length(model, ids.shape[1], settings)
    cache = static_cache(model, longest)
    with show.bar(ids.shape[1] - 1, "prefilling") as advance:
        prefill(model, ids[:, :-1], cache, advance)

    options = {"boundary_token_ids": sfi_compile.sentence_boundaries(tokenizer), **settings.options}
    forget_graphs()
    writer = _Streamer(tokenizer, show.text)
    dense = Decoder(model, copy.deepcopy(cache), "inductor")
    sparse = Decoder(model, cache, "sfi", options)
    dense_run, sparse_run = _Run(dense, ids[:, -1:], ignore), _Run(sparse, ids[:, -1:], writer.add)
    first = min(COMPILING_STEPS, settings.new_tokens)
    for name, run in (("dense", dense_run), ("sfi", sparse_run)):
        with show.busy(f"{name}: compiling"):
            run.advance(first)
    for done in range(first, settings.new_tokens, BLOCK):
        for run in (dense_run, sparse_run):
            run.advance(min(BLOCK, settings.new_tokens - done))
    writer.finish()
    dense_ids, sparse_ids = dense_run.ids, sparse_run.ids

    counted = sfi_compile.stats()
    runs = {"dense": dense, "sfi": sparse}
    on_cpu = settings.device == "cpu"
    return {
        "model": settings.model,
        "prompt_tokens": ids.shape[1],
        "new_tokens": settings.new_tokens,
        "max_cache_len": longest,
        "steps": {"slow": counted.slow_steps, "fast": counted.fast_steps, "short": counted.short_steps},
        "triggers": dict(counted.triggers),
        "tokens_per_second": {name: _rate(run.timed()) for name, run in runs.items()},
        "step_ms": {
            "dense": _ms(median(dense.timed())),
            "slow": _ms(median(sparse.timed("slow"))),
            "fast": _ms(median(sparse.timed("fast"))),
        },
        "compile_s": {name: round(run.compile_seconds(), 2) for name, run in runs.items()},
        "processor_share": {name: run.processor_share() if on_cpu else None for name, run in runs.items()},
        "agreement": agreement(dense_ids, sparse_ids),
        "retention": counted.retention,
        "support": counted.support,
        "memory_bytes": sparse.memory_bytes(),
        "sites": sparse.sites(),
        "rejections": [rejection.as_dict() for rejection in counted.rejections],
        "text": {
            "dense": tokenizer.decode(dense_ids, skip_special_tokens=True),
            "sfi": tokenizer.decode(sparse_ids, skip_special_tokens=True),
        },
    }


def agreement(dense: list[int], other: list[int]) -> dict[str, int | None]:
    """How two free-running greedy continuations compare, position by position.

    `first_difference` is the index of the first unequal token (None: identical). After it the two runs read different
    texts, so later matches, which `matching` counts too, say little.
    """
    equal = [a == b for a, b in zip(dense, other, strict=True)]
    return {
        "matching": sum(equal),
        "of": len(equal),
        "first_difference": equal.index(False) if not all(equal) else None,
    }


def _cache_length(model: Any, prompt: int, settings: GenerateSettings) -> int:
    needed = prompt + settings.new_tokens
    check_positions(model, prompt, settings.new_tokens)
    if settings.max_cache_len is not None and settings.max_cache_len < needed:
        raise LabError(f"--max-cache-len is {settings.max_cache_len}; this run needs at least {needed}")
    return settings.max_cache_len or needed


class _Run:
    """A greedy continuation, some steps at a time; `each` is given every token id."""

    def __init__(self, decoder: Decoder, token: torch.Tensor, each: Callable[[int], None]) -> None:
        self._decoder, self._token, self._each = decoder, token, each
        self.ids: list[int] = []

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self._token = self._decoder.step(self._token).argmax(-1, keepdim=True)
            self.ids.append(int(self._token))
            self._each(self.ids[-1])


class _Streamer:
    """Turns token ids into text piece by piece; holds back characters that are not complete yet."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token: int) -> None:
        self._ids.append(token)
        text = self._text()
        if not text.endswith("\ufffd"):
            self._show(text)

    def finish(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._write(text[self._shown :])
            self._shown = len(text)


def _rate(seconds: list[float]) -> float | None:
    return round(len(seconds) / sum(seconds), 2) if seconds else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
