"""linears: which linear layers become `sfi::linear`, which share one, and which are left alone.

The graphs are those of a CPU, taken for a GPU's, so that they run: bit for bit as before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from sfi_compile.passes import linears
from sfi_compile.passes.lower import Lower
from tests.passes.toys import SDPA, compiled, record, tensor, text, written

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LEAST", 16 * 16)


def combined(function: Callable[..., Any], *args: Any, device_type: str = "cpu") -> tuple[int, list[int]]:
    """How many linear layers are left, and how many weights each `sfi::linear` has; the graph computes the same."""
    recorded = record(function, *args)
    before = recorded.module(*recorded.fresh())
    linears.combine(recorded.graph, device_type)
    recorded.graph.lint()
    recorded.module.recompile()
    after = recorded.module(*recorded.fresh())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    targets = [n.target for n in recorded.graph.nodes]
    calls = [n for n in recorded.graph.nodes if n.target is torch.ops.sfi.linear.default]
    return targets.count(linear), [len(n.args[1]) for n in calls]


def x_of(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return tensor(*shape, 32, dtype=dtype)


def weight(rows: int = 16, depth: int = 32, seed: int = 1, dtype: torch.dtype = HALF) -> Tensor:
    return tensor(rows, depth, seed=seed, dtype=dtype)


def test_layers_of_one_input_share_an_operator() -> None:
    """Three of attention, two of a gated MLP, and one each whose input nobody shares."""

    def block(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        attended = linear(x, q) * linear(x, k) + linear(x, v)
        x = x + linear(attended, o)
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    square = [weight(32, seed=i) for i in range(4)]
    assert combined(block, x_of(4, 1), *square, weight(48), weight(48, seed=2), weight(32, 48)) == (0, [3, 1, 2, 1])


def test_no_more_than_three_weights() -> None:
    weights = [weight(seed=i) for i in range(5)]
    assert combined(lambda x, *w: [linear(x, one) for one in w], x_of(2), *weights) == (0, [3, 2])


def test_biases_keywords_and_modules() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return linear(x, w, b), linear(x, bias=None, weight=v), linear(x, v, bias=b)

    assert combined(function, x_of(4), weight(), weight(seed=2), tensor(16, dtype=HALF)) == (0, [3])
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 16, bias=False))
    assert combined(module.to(HALF), x_of(4)) == (0, [1, 1])


def test_an_input_that_changes_between_two_layers() -> None:
    """The second layer sees other values: they may not share."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        x = x + 1
        first = linear(x, w)
        x.view(-1).mul_(2)
        return first, linear(x, v), linear(x, w)

    assert combined(function, x_of(2, 2), weight(), weight(seed=2)) == (0, [1, 2])


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (x_of(17), weight()),
        (x_of(0), weight()),
        (x_of(4, dtype=torch.float32), weight(dtype=torch.float32)),
        (tensor(4, 24, dtype=HALF), weight(depth=24)),
        (x_of(4), weight(7)),
        (x_of(4), weight(32, 16).t()),
    ],
    ids=["rows", "none", "float32", "odd", "small", "transposed"],
)
def test_operands_left_alone(x: Tensor, w: Tensor) -> None:
    assert combined(linear_alone, x, w) == (1, [])


def linear_alone(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (linear(x, w),)


def test_what_just_fits() -> None:
    assert combined(linear_alone, x_of(2, 8), weight(8)) == (0, [1])
    assert combined(linear_alone, x_of(), weight(8)) == (0, [1])


def test_other_devices_are_left_alone() -> None:
    assert combined(linear_alone, x_of(4), weight(), device_type="cuda") == (1, [])


def test_vocabularies_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "WIDEST", 15)
    assert combined(linear_alone, x_of(4), weight()) == (1, [])


def viewed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return linear(x, w), w[0]


def computed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (linear(x, w * 2),)


def changed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first = linear(x, w)
    w.add_(1)
    return first, linear(x, w)


def both(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (linear(x, w), linear(w, w))


@pytest.mark.parametrize(("function", "left"), [(viewed, 1), (computed, 1), (changed, 2), (both, 2)])
def test_weights_left_alone(function: Callable[..., Any], left: int) -> None:
    """What others read, compute or change is no weight."""
    assert combined(function, x_of(4), weight(16)) == (left, [])


def test_a_tensor_subclass_is_left_alone() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    recorded = record(linear_alone, x_of(4), TwoTensor(weight(), weight()))
    linears.combine(recorded.graph, "cpu")
    assert not re.search(r"sfi\.linear", text(recorded.graph))


def test_symbolic_rows_are_left_alone() -> None:
    recorded = record(linear_alone, x_of(5), weight(), dynamic=True)
    linears.combine(recorded.graph, "cpu")
    assert not re.search(r"sfi\.linear", text(recorded.graph))


def projected(x: Tensor, w: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """A decode step whose queries, keys and values are projections of one input."""
    q, k, new = (linear(x, each).unsqueeze(1).unsqueeze(1) for each in (w, v, v))
    mask = written(k, new, keys, values, pos)
    return SDPA(q, keys, values, attn_mask=mask)


def test_slow_and_fast_graphs_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [tensor(2, 1, 8, 16, seed=i, dtype=HALF) for i in (3, 4)]
    recorded = record(projected, x_of(2), weight(), weight(seed=2), *caches, torch.tensor([5]))
    work = compiled(recorded.module, "verify")
    monkeypatch.setattr(linears, "combine", functools.partial(linears.combine, device_type="cpu"))
    for module in Lower(kernels=True).apply(work).variants:
        calls = [n for n in module.graph.nodes if n.target is torch.ops.sfi.linear.default]
        assert [len(n.args[1]) for n in calls] == [3]
        assert not re.search(r"\blinear\(", text(module.graph).replace("sfi.linear(", ""))


@pytest.mark.parametrize(("weight", "bias"), [((32,), None), ((16, 32), (1,)), ((16, 32), (2, 16))])
def test_weights_and_biases_of_other_ranks_are_left_alone(
    weight: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    given = [tensor(*shape, dtype=HALF) for shape in ((2, 32), weight, bias) if shape is not None]
    assert combined(lambda *given: (linear(*given),), *given) == (1, [])
