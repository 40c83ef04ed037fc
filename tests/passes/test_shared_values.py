"""shared_values: what many readers share is computed once, and nothing that is more than an expression is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sfi_compile.passes import shared_values
from tests.passes.toys import record

STILL = torch.ops.sfi.still.default


def kept(function: Callable[..., Any], *args: Tensor, device_type: str = "cpu") -> int:
    """Copies in a graph that still computes the same."""
    recorded = record(function, *args)
    wanted, given = recorded.fresh(), recorded.fresh()
    right = recorded.module(*wanted)
    shared_values.keep(recorded.graph, device_type)
    recorded.graph.lint()
    recorded.module.recompile()
    found = recorded.module(*given)
    for a, b in zip((*right, *wanted), (*found, *given), strict=True):
        assert torch.equal(a, b)
    for node in recorded.graph.nodes:
        if node.target is STILL:
            assert len(node.args[0].users) == 1
            assert len(node.users) >= shared_values.MANY
    return sum(n.target is STILL for n in recorded.graph.nodes)


def layers(count: int) -> Callable[..., Any]:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        cos, sin = x.cos(), x.sin()
        return tuple(x * cos.unsqueeze(0) + i * sin for i in range(count))

    return function


def test_what_every_layer_reads() -> None:
    assert kept(layers(shared_values.MANY), torch.randn(4)) == 2


def test_few_readers_compute_it_themselves() -> None:
    assert kept(layers(shared_values.MANY - 1), torch.randn(4)) == 0


def test_elsewhere_than_on_a_gpu_nothing_changes() -> None:
    assert kept(layers(shared_values.MANY), torch.randn(4), device_type="cuda") == 0


@pytest.mark.parametrize("x", [torch.randn(2**16 + 1), torch.arange(4)], ids=["large", "whole numbers"])
def test_values_that_a_copy_would_not_pay_for(x: Tensor) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        return tuple(doubled + i for i in range(shared_values.MANY))

    assert kept(function, x) == 0


def test_inputs_and_their_parts() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        part = x[:2]
        return tuple(part + x[0] + i for i in range(shared_values.MANY))

    assert kept(function, torch.randn(4)) == 0


def test_what_is_a_tensor_anyhow() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        product = x @ x
        halves = torch.split(product * 2, 2)
        return tuple(product + halves[0].sum() + i for i in range(shared_values.MANY))

    assert kept(function, torch.randn(4, 4)) == 0


def test_what_is_returned_shares_memory_with_its_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        value = x.cos()
        return value, value.view(2, 2), *(value + i for i in range(shared_values.MANY))

    assert kept(function, torch.randn(4)) == 0


def test_what_is_written_into_between_its_readers() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        value = x.cos()
        found = []
        for i in range(shared_values.MANY):
            found.append(value + i)
            value.view(2, 2)[0].add_(1.0)
        return tuple(found)

    assert kept(function, torch.randn(4)) == 0
