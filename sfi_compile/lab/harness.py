"""lm-evaluation-harness on slow and fast steps: the model `sfi`, beside the harness's own `hf`.

`hf` scores a continuation in one dense forward, where the backend never acts: a number that says nothing about a
sparse method. Here every request decodes through `accelerate` and `generate()`, scoring included: the prompt runs
densely and uncompiled, then one token a row and step is fed, of the text that is scored. `python -m
sfi_compile.lab.harness` is the harness's command line with this model in it. Imports the package's public names and
the lab.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import sfi_compile
from sfi_compile.lab.errors import LabError

try:
    import transformers
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"{error}: pip install 'sfi-compile[models,lm-eval]'") from error

log = logging.getLogger("sfi_compile")

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of what follows it, to be scored."""


@register_model("sfi")
class SfiLM(HFLM):  # type: ignore[misc]
    """A causal decoder of transformers whose requests run slow and fast steps; compiled in place.

    One decode graph serves every request: the static cache has `max_length` positions, and a batch that is not full
    is filled up with copies of its last row.

    Args:
        pretrained: a name or folder, or a model of transformers.
        max_length: tokens of the longest request, prompt and new (or scored) ones together.
        options: fields of `Config`, with `boundary_token_ids` from the tokenizer unless given.
        batch_size: rows of every step.
        truncation: cut requests that are too long on the left, as `hf` does, instead of refusing them.
        **kwargs: as for `hf`.

    Raises:
        LabError: an argument or a request that cannot be served.
        OptionError: a bad option of the backend.
    """

    steps: dict[str, dict[str, int]]
    """By kind of request, of this model: `requests`, `dense_requests` (one or two tokens to score, where no step can be
    fast), `slow_steps`, `fast_steps`, `short_steps`."""

    def __init__(
        self,
        pretrained: Any,
        max_length: int | None = None,
        options: Mapping[str, Any] | None = None,
        batch_size: int | str = 1,
        **kwargs: Any,
    ) -> None:
        options = _checked(max_length, options, batch_size)
        super().__init__(pretrained, max_length=max_length, batch_size=batch_size, **kwargs)
        if self.backend != "causal":
            raise LabError(f"{type(self.model).__name__} is an encoder-decoder; allowed: causal decoders")
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is not None and self.max_length > positions:
            raise LabError(f"max_length is {max_length}; allowed: 2 to the model's {positions} positions")
        sfi_compile.accelerate(self.model, self.tokenizer, max_cache_len=self.max_length, **options)
        self.options = options
        self.steps = {}
        self._dense_requests = 0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) → log-probability, and whether each token was the most likely one.

        The prompt gives the first token's probability and a slow step, which refreshes the memory, the second's. So
        a continuation of one or two tokens is scored by dense attention alone.
        """
        with self._counting("loglikelihood", len(requests)):
            return super().loglikelihood(requests, disable_tqdm)  # type: ignore[no-any-return]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Text → log-probability. Windows are those of `hf`; nearly every token of a text is a decode step."""
        with self._counting("loglikelihood_rolling", len(requests)):
            return super().loglikelihood_rolling(requests, disable_tqdm)  # type: ignore[no-any-return]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """(context, generation arguments) → text."""
        for given in {repr(request.args[1]): request.args[1] for request in requests}.values():
            new = normalize_gen_kwargs(given, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise LabError(f"max_gen_toks is {new}; allowed: below max_length, which is {self.max_length}")
        with self._counting("generate_until", len(requests)):
            return super().generate_until(requests, disable_tqdm)  # type: ignore[no-any-return]

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: `sfi_options`, `sfi_steps`, `sfi_stats` (of the process)."""
        info: dict[str, Any] = super().get_model_info()
        stats = sfi_compile.stats().as_dict()
        return info | {"sfi_options": self.options, "sfi_steps": self.steps, "sfi_stats": stats}

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and mask, int64 [rows, tokens]; refuses what `hf` would cut unasked."""
        room = left_truncate_len if truncation else None
        ids, mask = super().tok_batch_encode(strings, padding_side, room, truncation)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            new = self.max_length - left_truncate_len
            raise self._too_long("generate_until", ids.shape[1], new, self.max_length)
        return ids, mask

    def _too_long(self, kind: str, prompt: int, more: int, room: int) -> LabError:
        return LabError(
            f"a {kind} request has {prompt} tokens and {more} more; allowed: {room} together, "
            f"by max_length {self.max_length} (or truncation=True)"
        )

    @contextlib.contextmanager
    def _counting(self, kind: str, requests: int) -> Iterator[None]:
        """Add the steps taken meanwhile to `steps`; a warning if what was asked for is dense attention's, or a part."""
        names = ("slow_steps", "fast_steps", "short_steps")
        self._dense_requests = 0
        before = sfi_compile.stats()
        yield
        after = sfi_compile.stats()
        done = {name: getattr(after, name) - getattr(before, name) for name in names}
        done |= {"requests": requests, "dense_requests": self._dense_requests}
        held = self.steps.setdefault(kind, dict.fromkeys(("requests", "dense_requests", *names), 0))
        for name, count in done.items():
            held[name] += count
        if requests and not done["fast_steps"]:
            log.warning(
                "sfi: no fast step in %d %s requests: but for policy 'fresh', these results are dense attention's (%d "
                "slow steps, %d of them below min_context; sites left dense: %s)",
                requests, kind, done["slow_steps"], done["short_steps"],
                "; ".join(map(str, after.rejections)) or "none",
            )  # fmt: skip
        elif self._dense_requests:
            log.warning(
                "sfi: %d of %d %s requests score one or two tokens, which is dense attention's work",
                self._dense_requests, requests, kind,
            )  # fmt: skip

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **how: Any) -> Tensor:
        # One more than max_length: the last token is chosen (or scored) and not fed.
        if max_length > self.max_length + 1:
            new = max_length - context.shape[1]
            raise self._too_long("generate_until", context.shape[1], new, self.max_length)
        if getattr(self.model.generation_config, "max_new_tokens", None) is not None:
            # The model's own would go before the length that is asked for.
            how["max_new_tokens"] = max_length - context.shape[1]
        rows = len(context)
        full = torch.arange(self.batch_size, device=context.device).clamp(max=rows - 1)
        how["attention_mask"] = how["attention_mask"][full]
        return super()._model_generate(context[full], max_length, stop, **how)[:rows]  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        self._dense_requests += sum(key is not None and len(continuation) < 3 for key, _, continuation in requests)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc="Running sfi steps") as bar:
            for batch in _batches(pairs, self.batch_size, self.max_length + 1):
                for i, answer in zip(batch, self._scores([pairs[i] for i in batch]), strict=True):
                    found[i] = answer
                    if requests[i][0] is not None:  # a window of a rolling request has no key
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
                bar.update(len(batch))
        return [found[i] for i in range(len(pairs))]

    def _fitting(self, context: list[int], continuation: list[int]) -> Pair:
        """The pair, its context cut on the left if that is allowed and needed."""
        before, scored = len(context), len(continuation)
        if not before or not scored:
            raise LabError(f"a request has {before} tokens of context and {scored} to score; allowed: one at least")
        room = self.max_length + 1  # the last token is scored and not fed
        if scored >= room or (before + scored > room and not self.truncation):
            raise self._too_long("loglikelihood", before, scored, room)
        return context[scored - room :], continuation

    def _scores(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Feed each row its own continuation through `generate()`."""
        width, steps = (max(len(pair[part]) for pair in pairs) for part in (0, 1))
        full = [*pairs, *pairs[-1:] * (self.batch_size - len(pairs))]
        # A shorter continuation goes on with its last token, which does not count.
        targets = torch.tensor([[*c, *c[-1:] * (steps - len(c))] for _, c in full], device=self.device)
        padding = self.tokenizer.pad_token_id
        prompt = torch.tensor([[padding] * (width - len(c)) + c for c, _ in full], device=self.device)
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c, _ in full], device=self.device)
        teacher = _Teacher(width, targets)
        with _plain_generation(self.model):
            self._model_generate(prompt, width + steps, [], attention_mask=mask, logits_processor=[teacher])
        return teacher.answers([len(continuation) for _, continuation in pairs])


class _Teacher:
    """Logits processor that notes how likely the target is, and then lets nothing else be chosen."""

    def __init__(self, width: int, targets: Tensor) -> None:
        """Args: tokens of the prompt; int64 [rows, steps]."""
        self._width, self._targets = width, targets
        self._found: list[Tensor] = []
        self._right: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Token ids so far [rows, tokens], logits [rows, vocabulary] → logits."""
        target = self._targets[:, input_ids.shape[1] - self._width, None]
        self._found.append(scores.float().log_softmax(-1).gather(1, target)[:, 0])
        self._right.append(scores.argmax(-1) == target[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, target, 0.0)

    def answers(self, lengths: list[int]) -> list[tuple[float, bool]]:
        """Of the first rows: log-probability of so many targets, and whether all of them were the most likely."""
        found, right = torch.stack(self._found, 1).cpu(), torch.stack(self._right, 1).cpu()
        return [(float(found[i, :n].sum()), bool(right[i, :n].all())) for i, n in enumerate(lengths)]


def _batches(pairs: Sequence[Pair], size: int, room: int) -> Iterator[list[int]]:
    """Numbers of pairs that are scored together, those of like length; padded to their longest, they fit the room."""
    batch: list[int] = []
    context = continuation = 0
    for i in sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][1]), -len(pairs[i][0]))):
        context, continuation = max(context, len(pairs[i][0])), max(continuation, len(pairs[i][1]))
        if batch and (len(batch) == size or context + continuation > room):
            yield batch
            batch, context, continuation = [], len(pairs[i][0]), len(pairs[i][1])
        batch.append(i)
    if batch:
        yield batch


@contextlib.contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """`generate()` without what a model's own settings do to logits (penalties) or after an end-of-text token."""
    own = model.generation_config
    kept = {name: getattr(own, name) for name in ("cache_implementation", "disable_compile", "max_cache_len")}
    model.generation_config = transformers.GenerationConfig(**kept)
    try:
        yield
    finally:
        model.generation_config = own


def _checked(max_length: Any, options: Any, batch_size: Any) -> dict[str, Any]:
    """The options as a dict, if all three are good."""
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise LabError(
            f"max_length is {max_length!r}; allowed: a whole number >= 2, the tokens of the longest request, for "
            f"which a static cache is allocated"
        )
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise LabError(f"batch_size is {batch_size!r}; allowed: a whole number >= 1, since a graph serves one size")
    if options is not None and not isinstance(options, Mapping):
        raise LabError(f"options is {options!r}; allowed: a mapping, so --model_args must be JSON")
    return dict(options or {})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
