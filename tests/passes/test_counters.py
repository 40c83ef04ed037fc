"""Counters: all advance at once, after everything that reads them, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes import counters
from tests.passes.toys import record

STILL = torch.ops.sfi.still.default


def count(value: int = 3) -> Tensor:
    return torch.tensor(value)


def combined(function: Callable[..., Any], *args: Tensor) -> tuple[int, int, int]:
    """Separate advances, counters advanced together, and copies, of a graph that still computes the same."""
    recorded = record(function, *args)
    wanted, given = recorded.fresh(), recorded.fresh()
    right = recorded.module(*wanted)
    counters.combine(recorded.graph, device_type="cpu")
    recorded.graph.lint()
    recorded.module.recompile()
    found = recorded.module(*given)
    for a, b in zip((*right, *wanted), (*found, *given), strict=True):
        assert torch.equal(a, b)
    nodes = list(recorded.graph.nodes)
    alone = [n for n in nodes if n.target == "add_"]
    together = [n for n in nodes if n.target is torch._foreach_add_]
    lists = [n.args[0] for n in together]
    held = [n for n in nodes if n.target is STILL]
    assert all(isinstance(n, fx.Node) for listed in lists for n in listed)
    return len(alone), sum(map(len, lists)), len(held)


def layers(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
    """The first counter places the mask, too."""
    mask = torch.arange(8) <= each[0]
    found = []
    for counter in each:
        at = torch.arange(1) + counter
        counter.add_(1)
        found.append(torch.where(mask, x, 0.0) + at)
    return tuple(found)


def test_of_each_layer() -> None:
    assert combined(layers, torch.randn(8), count(), count(), count()) == (0, 3, 1)


def test_a_counter_by_another_name() -> None:
    """What Dynamo leaves of a move to where the counter is."""

    def function(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        offset = one.view(1)
        early = offset * 2
        one.add_(1)
        other.add_(1)
        return (early,)

    assert combined(function, count(), count()) == (0, 2, 1)


def test_what_reads_a_counter_afterwards_sees_it_advanced() -> None:
    def function(one: Tensor, other: Tensor, third: Tensor) -> tuple[Tensor, ...]:
        offset = one.view(1)
        for counter in (one, other, third):
            counter.add_(1)
        return offset * 2, other + 1

    assert combined(function, count(), count(), count()) == (3, 0, 0)


def test_other_amounts_widths_and_ways_of_writing() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        a.add_(1)
        b.add_(1)
        c.add_(2)  # alone with its amount
        d.add_(1)  # not one number
        e.add_(1.5)
        f.add_(1)
        f.add_(1)
        return (x + 1,)

    more = (torch.tensor([3, 4]), torch.tensor(0.5), count())
    assert combined(function, torch.randn(2), count(), count(), count(), *more) == (5, 2, 0)


@pytest.mark.parametrize("amount", [1, 4])
def test_steps_of_several_tokens(amount: int) -> None:
    def function(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        at = torch.arange(amount) + one, torch.arange(amount) + other
        one.add_(amount)
        other.add_(amount)
        return at

    assert combined(function, count(), torch.tensor([5])) == (0, 2, 0)
