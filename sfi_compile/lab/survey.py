"""`sfi explain --families`: what the compiler does with a decode step of every family. Imports the lab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import sfi_compile
from sfi_compile.compat.dynamo import TorchDynamoException
from sfi_compile.lab.decode import forget_graphs
from sfi_compile.lab.families import Family, MissingFamilyError, next_step
from sfi_compile.lab.family_list import FAMILIES
from sfi_compile.lab.handwritten import VOCAB

BATCH, PROMPT, CACHE = 2, 19, 96
"""Rows, tokens before the step, positions of a static cache."""
PREFILL_ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)
"""What a decoder raises in a release of transformers in which it takes no such cache or argument."""


def run_survey(
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda name: None,
    families: Sequence[Family] | None = None,
) -> dict[str, Any]:
    """One row for each family; keys as in docs/cli.md. Nothing is compiled.

    Args:
        options: of the backend; `min_context` is 0 unless given, since these caches are short.
        progress: called with the name of each family before it is looked at.
        families: which ones; None: all of the sample.

    Raises:
        OptionError: a bad option.
    """
    rows = []
    for family in FAMILIES if families is None else families:
        progress(family.name)
        rows.append(survey_one(family, {"min_context": 0} | (options or {})))
    return {"families": rows}


def survey_one(family: Family, options: dict[str, Any]) -> dict[str, Any]:
    """The row of one family; why it cannot be built or traced is its `error`."""
    row: dict[str, Any] = {"family": family.name, "sites": 0, "dense": 0, "codes": [], "rejections": [], "error": None}
    ids = torch.randint(2, VOCAB, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    try:
        model = family.build()
    except MissingFamilyError as error:
        return row | {"error": _line(error)}
    try:
        args, kwargs = next_step(family, model, ids, CACHE)
    except PREFILL_ERRORS as error:
        return row | {"error": f"the prompt fails: {_line(error)}"}
    forget_graphs()
    try:
        found = sfi_compile.explain(model, *args, options=options, **kwargs)
    except TorchDynamoException as error:
        return row | {"error": _line(error)}
    return row | {
        "sites": len(found.sites),
        "dense": sum(rejection.where != "graph" for rejection in found.rejections),
        "codes": list(dict.fromkeys(rejection.code for rejection in found.rejections)),
        "rejections": [rejection.as_dict() for rejection in found.rejections],
    }


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
