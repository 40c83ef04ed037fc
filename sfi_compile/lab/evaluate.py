"""`sfi eval`: how far text decoded by slow and fast steps is from dense, by policy and by share of the tokens kept.

Passages are decoded with the tokens that they hold, one at a time, through the compiled graphs that a user runs; the
reference is the same model, uncompiled. All passages of a task are rows of one batch. Imports the package's public
names and the lab.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sfi_compile
from sfi_compile import policies
from sfi_compile.config import PRESETS
from sfi_compile.lab.decode import Decoder, forget_graphs
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import check_positions, load, static_cache
from sfi_compile.lab.progress import Progress
from sfi_compile.lab.recall import Recorder, recalls
from sfi_compile.lab.records import Records
from sfi_compile.lab.reference import Reference, log_probabilities
from sfi_compile.lab.tasks import check_task, passages
from sfi_compile.lab.texts import CHARS_PER_TOKEN, given_text, read_prompt

log = logging.getLogger("sfi_compile")

LEAST_RECENT = 32
"""Tokens: a short memory still knows the last sentence."""


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """What to evaluate: every context × policy × share kept × task."""

    model: str
    prompt_file: str | None
    text: str
    policies: tuple[str, ...]
    """Policies as in the options, or presets."""
    keeps: tuple[float, ...]
    """Shares of the context that a memory holds after a refresh, 0 to 1."""
    contexts: tuple[int, ...]
    tasks: tuple[str, ...]
    passages: int
    new_tokens: int
    seed: int
    dtype: torch.dtype
    device: str
    options: dict[str, Any]


def options_of(policy: str, keep: float, context: int, options: dict[str, Any]) -> dict[str, Any]:
    """Backend options under which a memory holds `keep` of a context of that many tokens.

    Sinks, the recent segment and the selection count, as they are after a refresh. The recent segment keeps its share
    of the preset's memory, but has `LEAST_RECENT` tokens at least, and half of the budget at most.

    Raises:
        LabError: an option that another argument gives, or too small a budget.
        OptionError: a bad option, or no such policy.
    """
    for key, given in (("k_head", "keep"), ("min_context", "keep"), ("policy", "policy"), ("preset", "policy")):
        if key in options:
            raise LabError(f"--option {key}: given by --{given}")
    chosen = {"preset": policy} if policy in PRESETS else {"policy": policy}
    if policies.parse(sfi_compile.Config.from_options(chosen).policy).reads_memory:
        options = {key: value for key, value in options.items() if key != "refresh_interval"}
    config = sfi_compile.Config.from_options({**chosen, **options})
    budget = round(keep * context)
    share = config.recent / (config.sink + config.recent + config.k_head)
    scaled = max(min(max(round(share * budget), LEAST_RECENT), budget // 2), 1)
    recent = config.recent if "recent" in options else scaled
    k_head = budget - config.sink - recent
    if k_head < 1:
        raise LabError(
            f"--keep {keep:g} of {context} tokens is {budget}; sinks and recent tokens take {config.sink + recent}"
        )
    return {**chosen, **options, "recent": recent, "k_head": k_head, "min_context": 0}


def run_eval(settings: EvalSettings, records: Records, progress: Progress | None = None) -> None:
    """Evaluate what `records` does not hold yet, and add it there; keys as in docs/cli.md.

    Raises:
        LabError: what cannot be loaded or does not fit, or a model without an attention site to rewrite.
        OptionError: a bad option of the backend, or no such policy.
    """
    show = progress or Progress()
    for task in settings.tasks:
        check_task(task)
    cases = list(itertools.product(settings.contexts, settings.policies, settings.keeps))
    keys = _keys(settings)
    missing = {(c, p, k): [t for t in settings.tasks if not records.holds(keys[c, p, k, t])] for c, p, k in cases}
    if not any(missing.values()):
        return
    size = settings.passages * (max(settings.contexts) + settings.new_tokens)
    text = given_text(settings.prompt_file, settings.text, size, settings.seed)
    with show.busy(f"loading {settings.model}"):
        model, tokenizer = load(settings.model, settings.dtype, settings.device)
    check_positions(model, max(settings.contexts), settings.new_tokens)
    with show.busy("reading the text"):
        ids = tokenizer(text[: size * CHARS_PER_TOKEN], verbose=False, add_special_tokens=False)["input_ids"][:size]
    boundaries = sfi_compile.sentence_boundaries(tokenizer)

    def encode(part: str) -> list[int]:
        found: list[int] = tokenizer(part, verbose=False, add_special_tokens=False)["input_ids"]
        return found

    for context in settings.contexts:
        rows = {
            task: passages(task, ids, encode, context, settings.new_tokens, settings.passages, settings.seed)
            for task in settings.tasks
        }
        here = {case: tasks for case, tasks in missing.items() if case[0] == context and tasks}
        cache = static_cache(model, context + settings.new_tokens)
        references: dict[str, Reference] = {}
        for task in dict.fromkeys(task for tasks in here.values() for task in tasks):
            with show.bar(context + settings.new_tokens, f"dense, {task}, context {context}") as advance:
                references[task] = Reference.of(model, cache, rows[task], advance)
        for (_, policy, keep), tasks in here.items():
            options = options_of(policy, keep, context, settings.options)
            forget_graphs()
            decoder = Decoder(model, cache, "sfi", {"boundary_token_ids": boundaries, **options})
            for task in tasks:
                about = f"{policy}, keep {keep:g}, {task}, context {context}"
                with show.bar(references[task].steps, about) as advance:
                    measured, recorder = _measure(decoder, cache, references[task], advance)
                recalled = None
                if recorder is not None:
                    with show.bar(references[task].steps, f"recall, {about}") as advance:
                        recalled = recalls(model, cache, references[task], recorder, decoder.sites(), advance)
                key = keys[context, policy, keep, task]
                records.add(
                    [
                        key | {"passage": i} | row | {"recall": recalled and recalled[i]}
                        for i, row in enumerate(measured)
                    ]
                )


def _keys(settings: EvalSettings) -> dict[tuple[int, str, float, str], dict[str, Any]]:
    """By context, policy, share and task: what a record must agree in to be of this evaluation."""
    text = settings.text
    if settings.prompt_file is not None:
        digest = hashlib.sha256(read_prompt(settings.prompt_file).encode()).hexdigest()
        text = f"{settings.prompt_file} {digest[:12]}"
    found: dict[tuple[int, str, float, str], dict[str, Any]] = {}
    for context, policy, keep in itertools.product(settings.contexts, settings.policies, settings.keeps):
        config = sfi_compile.Config.from_options(options_of(policy, keep, context, settings.options))
        key = {
            "model": settings.model, "text": text, "seed": settings.seed,
            "dtype": str(settings.dtype).removeprefix("torch."), "device": settings.device, "context": context,
            "new_tokens": settings.new_tokens, "passages": settings.passages, "policy": policy, "keep": keep,
            "config": dataclasses.asdict(config),
        }  # fmt: skip
        found |= {(context, policy, keep, task): key | {"task": task} for task in settings.tasks}
    return found


def _measure(
    decoder: Decoder, cache: Any, reference: Reference, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], Recorder | None]:
    """What each row's record says beside its key, and what memories held; None where that cannot be told."""
    reference.restore(cache)
    sfi_compile.reset()
    first = len(decoder.steps)
    found = []
    recorder: Recorder | None = Recorder()
    for i in range(reference.steps):
        found.append(log_probabilities(decoder.step(reference.tokens[:, i : i + 1])).cpu())
        supports = decoder.supports()
        if supports is None and recorder is not None:
            log.warning("no recall: no graph, or several, whose memories can be read; see docs/cli.md")
            recorder = None
        if recorder is not None and supports is not None:
            recorder.add(*supports)
        advance(1)
    stats = sfi_compile.stats()
    if not stats.sites:
        raise LabError(f"no attention site was rewritten: {'; '.join(map(str, stats.rejections)) or 'no rejections'}")
    steps = [s for s in decoder.steps[first:] if not s.compiled]
    shared = {
        # Of a batch that decides row by row: slow rows over all rows and steps.
        "slow_share": sum(stats.triggers.values()) / reference.tokens.numel(),
        "support": stats.support,
        "rejections": len(stats.rejections),
        "tokens_per_second": len(reference.tokens) * len(steps) / sum(s.seconds for s in steps) if steps else None,
    }
    every, targets = reference.scored.cpu(), reference.targets.cpu()
    dense = torch.split(reference.log_probabilities, every.sum(1).tolist())
    rows = []
    for b, (scored, wanted) in enumerate(zip(every, dense, strict=True)):
        got = torch.stack([found[i][b] for i in scored.nonzero().flatten().tolist()])
        rows.append(_compare(got, wanted, targets[b][scored]) | shared)
    return rows, recorder


def _compare(got: Tensor, dense: Tensor, targets: Tensor) -> dict[str, Any]:
    """Log-probabilities [tokens, vocabulary] against those of dense attention, in nats a token."""

    def likelihood(x: Tensor) -> float:
        return -float(x.gather(1, targets[:, None]).mean())

    def right(x: Tensor) -> float:
        return float((x.argmax(1) == targets).float().mean())

    return {
        "nll": likelihood(got),
        "nll_dense": likelihood(dense),
        "kl": float((dense.exp() * (dense - got)).sum(1).mean()),
        "top1": float((got.argmax(1) == dense.argmax(1)).float().mean()),
        "score": right(got),
        "score_dense": right(dense),
    }


def found_of(settings: EvalSettings, records: Records) -> list[dict[str, Any]]:
    """The records of this evaluation, in its order."""
    return [row for key in _keys(settings).values() for row in records.matching(key)]


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over passages, one for each context, policy, share and task, in the order found."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ("context", "policy", "keep", "task")), []).append(row)
    found = []
    for (context, policy, keep, task), members in groups.items():
        summary = {"context": context, "policy": policy, "keep": keep, "task": task, "passages": len(members)}
        columns = {key: [m[key] for m in members] for key in ("nll", "nll_dense", "kl", "top1", "score", "score_dense")}
        columns["delta"] = [m["nll"] - m["nll_dense"] for m in members]
        for key, values in columns.items():
            summary[key] = statistics.fmean(values)
            summary[f"{key}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        summary["recall"] = _mean_by_age([m.get("recall") for m in members])
        found.append(summary | {key: members[0][key] for key in ("slow_share", "support", "tokens_per_second")})
    return found


def _mean_by_age(recalls: list[list[float | None] | None]) -> list[float | None] | None:
    """Means over passages, age by age; None where no passage has one."""
    every = [recall for recall in recalls if recall is not None]
    by_age = [[r for r in of_age if r is not None] for of_age in itertools.zip_longest(*every)]
    return [statistics.fmean(x) if x else None for x in by_age] if every else None
