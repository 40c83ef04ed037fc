"""Whole steps as on a GPU, without one: the graphs run as plain FX, their Triton kernels under the interpreter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import sfi_compile
from sfi_compile.passes import pipeline
from sfi_compile.passes.lower import Lower
from tests.decoders import BY_NAME
from tests.harness import FULL, SMALL, compiled, decode, eager_lowering, prompt
from tests.kernels.triton_tools import interpreted, needs_triton

pytestmark = needs_triton
PROMPT, STEPS, LENGTH, BOUNDARY = 19, 6, 32, 5


def run(name: str, options: dict[str, Any], tokens: Tensor, kernels: bool) -> tuple[Tensor, list[str], dict[str, int]]:
    """Logits and kinds of the steps, and the triggers."""
    decoder = BY_NAME[name]
    model, _ = decoder.build()
    passes = tuple(Lower(kernels=kernels) if isinstance(p, Lower) else p for p in pipeline.REWRITE)
    sfi_compile.reset()
    with mock.patch.object(pipeline, "REWRITE", passes), eager_lowering():
        found = decode(decoder, model, compiled(model, **options), prompt(2, PROMPT), STEPS, LENGTH, tokens)
    return found.logits, found.kinds, sfi_compile.stats().triggers


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("gpt-oss", {}),
        ("deepseek-v3", {}),
        ("llama", {"preset": "paper-speed"}),
        ("llama", {"policy": "h2o(decay=0.5)"}),
    ],
    ids=["llama", "gpt-oss", "deepseek-v3", "llama-paper-speed", "llama-h2o"],
)
def test_steps_are_what_plain_torch_computes(name: str, more: dict[str, Any]) -> None:
    """Also where only one of two rows is slow."""
    tokens = prompt(2, STEPS, 1)
    tokens[1, 4] = BOUNDARY
    options = {**SMALL, "min_refresh_gap": 2, "refresh_interval": 5, "boundary_token_ids": (BOUNDARY,), **more}
    logits, kinds, triggers = interpreted(run, name, options, tokens, True)
    wanted, wanted_kinds, wanted_triggers = run(name, options, tokens, False)
    assert kinds == wanted_kinds
    assert triggers == wanted_triggers
    assert triggers["boundary"] == 1
    assert kinds.count("fast") >= 2
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_memory_of_everything_is_dense() -> None:
    decoder = BY_NAME["llama"]
    model, _ = decoder.build()
    tokens = prompt(2, STEPS, 1)
    dense = decode(decoder, model, model.forward, prompt(2, PROMPT), STEPS, LENGTH, tokens)
    logits, kinds, _ = interpreted(run, "llama", {**FULL, "refresh_interval": 3}, tokens, True)
    assert kinds == ["slow", "fast", "fast"] * 2
    torch.testing.assert_close(logits, dense.logits, rtol=1e-4, atol=1e-4)
