"""Policy `reach`: its score against the oracle, what it refuses, and what it prefers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfi_compile import policies
from sfi_compile.kernels import reference
from tests.e2e.test_policies import chosen, evidence


@pytest.mark.parametrize(("fading", "weight"), [(1.0, 0.3), (0.9, 2.0), (0.99, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize(("ahead", "decay"), [(4, 0.8), (0, 0.5), (60, 1.0), (5, 0.0)])
def test_reach_carries_on_what_is_taken(ahead: int, decay: float, fading: float, weight: float) -> None:
    """What two slow steps took, five tokens apart, times the norm of the value; and a share of it further on."""
    policy = policies.Reach(fading=fading, weight=weight, ahead=ahead, decay=decay)
    for seed in range(5):
        given, before = evidence(seed=seed), evidence(seed=seed + 100)
        heads, _, size = given.logits.shape
        values = torch.randn(heads, size, 3, generator=torch.Generator().manual_seed(seed))
        # What nobody attends to may hold anything, and what is attended to may be zero.
        values[:, -2:] = torch.nan
        values[:, 5] = 0.0
        history = torch.zeros(heads, size)
        for one, tokens in ((before, 0), (given, 5)):
            history = policy.accumulated(history, one.logits.softmax(-1).sum(1), tokens)
        shown = dataclasses.replace(given, history=history, values=values)
        scores = policies.scores_of(policy, shown)
        seen, nothing = torch.ones(size, dtype=torch.bool), torch.zeros(size)
        for h, found in enumerate(chosen(policy.to_text(), shown)):
            taken = reference.attended(nothing, before.logits[h], seen, 1.0)
            taken = reference.attended(taken, given.logits[h], seen, fading**5)
            norms = values[h].double().norm(dim=-1).clamp_min(1e-6)
            wanted = reference.carried((taken * norms).nan_to_num(0.0), weight, ahead, decay)
            torch.testing.assert_close(
                scores[h].double()[given.candidates], wanted[given.candidates], rtol=1e-5, atol=1e-9
            )
            worth = wanted.tolist()
            ranked = sorted(given.candidates.nonzero().flatten().tolist(), key=lambda t: (-worth[t], t))
            assert found == sorted(ranked[:7])


def test_reach_without_what_it_reads_is_refused() -> None:
    given = evidence()
    history, values = torch.zeros(3, 40), torch.zeros(3, 40, 3)
    for lacking in ({"history": history}, {"values": values}, {}):
        with pytest.raises(ValueError, match="'reach': history or values are None; allowed: a tensor for each"):
            policies.scores_of(policies.Reach(), dataclasses.replace(given, **lacking))


def test_reach_prefers_what_comes_after_a_peak() -> None:
    """Of two passages that are attended to alike, what follows the peak is taken, and nothing before it."""
    history = torch.full((1, 40), 1e-3)
    history[0, 10] = 1.0
    shown = dataclasses.replace(evidence(heads=1), history=history, values=torch.ones(1, 40, 3))
    assert chosen("reach", shown, 5) == [[10, 11, 12, 13, 14]]
    assert chosen("reach(ahead=2)", shown, 5) == [[2, 3, 10, 11, 12]]
    assert chosen("reach(weight=0)", shown, 5) == [[2, 3, 4, 5, 10]]


@pytest.mark.parametrize("bad", [{"fading": 1.5}, {"per_step": -0.1}, {"decay": 2.0}, {"weight": -1.0}, {"ahead": -1}])
def test_scores_of_attention_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"Attended\(.*allowed: "):
        policies.Attended(**bad)  # type: ignore[arg-type]
