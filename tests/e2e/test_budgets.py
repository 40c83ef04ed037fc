"""Budgets that differ from site to site (policy `pyramidkv`): their sizes, what memories hold, what is counted."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sfi_compile
from sfi_compile import diagnostics, policies
from sfi_compile.policies import Evidence, Policy
from tests.decoders import BY_NAME
from tests.harness import SMALL, compiled, decode, eager_lowering, prompt


def budgets(policy: Policy, sites: int, k_head: int, context: int) -> list[int]:
    return [policies.budget_of(policy, i, sites, k_head, context) for i in range(sites)]


@given(st.integers(1, 60), st.integers(1, 5000), st.integers(1, 5000), st.floats(1.0, 100.0))
def test_budgets_fall_evenly_and_sum_up(sites: int, k_head: int, context: int, beta: float) -> None:
    found = budgets(policies.PyramidKV(beta=beta), sites, k_head, context)
    mean = min(k_head, context)
    assert sum(found) == sites * mean
    assert found == sorted(found, reverse=True)
    assert min(found) >= 1
    assert max(found) <= context
    falls = [a - b for a, b in itertools.pairwise(found)]
    assert not falls or max(falls) - min(falls) <= 2, "as even as whole numbers allow"
    if sites > 1 and mean / beta >= 1 and 2 * mean - mean / beta <= context:
        assert abs(found[-1] - mean / Fraction(beta)) <= 1
        assert abs(found[0] - (2 * mean - mean / Fraction(beta))) <= 1


def test_budgets_of_the_published_shape() -> None:
    """A total of 32 x 64 tokens: 64 / 20 for the last layer, twice 64 less that for the first."""
    found = budgets(policies.PyramidKV(), 32, 64, 4096)
    assert (found[0], found[-1], sum(found)) == (125, 3, 32 * 64)
    assert budgets(policies.PyramidKV(beta=1), 5, 64, 4096) == [64] * 5
    assert budgets(policies.PyramidKV(), 1, 64, 4096) == [64]
    assert budgets(policies.PyramidKV(), 3, 100, 120) == [120, 100, 80], "what the first cannot take, the last gets"
    assert budgets(policies.PyramidKV(), 3, 100_000, 40) == [40, 40, 40]
    assert budgets(policies.TopK(), 3, 64, 40) == [64] * 3


@policies.register
@dataclasses.dataclass(frozen=True)
class Lopsided(Policy):
    """Gives a site a fixed budget."""

    name: ClassVar[str] = "lopsided"
    budgets: tuple[float, ...] = ()

    def budget(self, site: int, sites: int, k_head: int, context: int) -> int:
        return self.budgets[site]  # type: ignore[return-value]

    def scores(self, evidence: Evidence) -> Tensor:
        return evidence.log_attention


@pytest.mark.parametrize("text", ["(0,4)", "(1.5,4)", "(-2,4)"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    policy = policies.parse(f"lopsided(budgets={text})")
    with pytest.raises(ValueError, match=r"'lopsided' gave site 0 a budget of .*; allowed: whole numbers >= 1"):
        budgets(policy, 2, 8, 40)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [("pyramidkv(queries=2,beta=4)", (14, 2)), ("lopsided(budgets=(3,30))", (3, 30)), ("snapkv", (8, 8))],
)
def test_every_memory_holds_its_own_budget(policy: str, wanted: tuple[int, int]) -> None:
    llama = BY_NAME["llama"]
    assert llama.sites == len(wanted)
    model, _ = llama.build()
    with eager_lowering():
        run = decode(llama, model, compiled(model, **SMALL, policy=policy), prompt(2, 30), 3, 40)
    assert run.kinds == ["slow", "fast", "fast"]
    [runner] = diagnostics.runners
    fixed = SMALL["sink"] + SMALL["recent"]
    kept = []
    for i, k in enumerate(wanted):
        slots = fixed + k + SMALL["refresh_interval"]
        shapes = {runner.state[f"sfi_{name}_{i}"].shape[:3] for name in ("held", "mem_k", "mem_v")}
        assert shapes == {torch.Size([2, 2, slots])}
        held = runner.state[f"sfi_held_{i}"]
        chosen = held[:, :, SMALL["sink"] : SMALL["sink"] + k]
        assert ((chosen >= 0).sum(-1) == min(k, 31 - fixed)).all()
        kept.append(float((held >= 0).sum(-1).double().mean()))
    # The mean over the two fast steps: the first had a token less than there are now.
    assert sfi_compile.stats().support == pytest.approx(sum(kept) / len(kept) - 0.5)
