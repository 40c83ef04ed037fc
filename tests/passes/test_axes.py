"""Named axes: what every kind of node is one level up, and every reason why a gather stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes import axes
from tests.passes.toys import Recorded, record, tensor

B, H, N, D, S = 2, 3, 7, 4, 5
GATHER = torch.ops.sfi.gather.default


def value(function: Callable[..., Any], *args: Any) -> tuple[Recorded, fx.Node]:
    """A graph and the node of its (first) result."""
    recorded = record(function, *args)
    output = next(n for n in recorded.graph.nodes if n.op == "output")
    return recorded, output.args[0][0]


def step_of(function: Callable[..., Any], layout: str, *args: Any) -> axes.Step:
    return axes.step(value(function, *args)[1], layout)


x = tensor(B, H, N, D)
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "transpose": (lambda t: t.transpose(1, 2), "bhsd", "bshd"),
    "transpose, negative axes": (lambda t: t.transpose(-3, -2), "bhsd", "bshd"),
    "torch.transpose": (lambda t: torch.transpose(t, 1, 2), "bhsd", "bshd"),
    "swapaxes": (lambda t: t.swapaxes(1, 2), "bhsd", "bshd"),
    "permute": (lambda t: t.permute(2, 0, 1, 3), "bhsd", "hsbd"),
    "permute, a tuple": (lambda t: t.permute((2, 0, 1, 3)), "bhsd", "hsbd"),
    "unsqueeze": (lambda t: t.unsqueeze(1), "b1hsd", "bhsd"),
    "squeeze": (lambda t: t[:1].squeeze(0), "hsd", "1hsd"),
    "None": (lambda t: t[:, :, None], "bh1sd", "bhsd"),
    "Ellipsis": (lambda t: t[..., None, :], "bhs1d", "bhsd"),
    "full slices": (lambda t: t[:, :, 0:N], "bhsd", "bhsd"),
    "expand": (lambda t: t[:1].expand(B, H, N, D), "bhsd", "1hsd"),
    "reshape": (lambda t: t.reshape(B, 1, H, N, D, 1), "b1hsd1", "bhsd"),
    "view": (lambda t: t.view(B, H, 1, N, D), "bh1sd", "bhsd"),
    "contiguous": (lambda t: t.contiguous(), "bhsd", "bhsd"),
    "clone": (lambda t: t.clone(), "bhsd", "bhsd"),
    "detach": (lambda t: t.detach(), "bhsd", "bhsd"),
    "result of a write": (lambda t: t.mul_(2), "bhsd", "bhsd"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_rename_axes(name: str) -> None:
    function, layout, expected = VIEWS[name]
    found = step_of(function, layout, x)
    assert isinstance(found, axes.View)
    assert found.layout == expected
    assert len(expected) == len(axes.shape_of(found.source) or ())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), ""), ((D,), "d"), ((N, 1), "s1"), ((H, 1, 1), "h11"), ((B, 1, 1, 1), "b111"), ((1, H, N, D), "1hsd")],
)
def test_pointwise_operands_broadcast(shape: tuple[int, ...], expected: str) -> None:
    recorded, node = value(lambda t, other: t * other, x, tensor(*shape))
    found = axes.step(node, "bhsd")
    assert found == axes.Pointwise({recorded.node("l_t_"): "bhsd", recorded.node("l_other_"): expected})


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.to(torch.bfloat16),
        lambda t: -t,
        lambda t: t.masked_fill(t > 0, 0.0),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: t.clamp(0, 1),
        lambda t: torch.rsqrt(t),
        lambda t: t**2,
        lambda t: torch.logical_and(t > 0, t < 1),
    ],
)
def test_pointwise(function: Callable[[Tensor], Tensor]) -> None:
    assert isinstance(step_of(function, "bhsd", x), axes.Pointwise)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.arange(N), axes.Arange(0, 1)),
        (lambda: torch.arange(2, N), axes.Arange(2, 1)),
        (lambda: torch.arange(9, -5, -2), axes.Arange(9, -2)),
        (lambda: torch.arange(N, dtype=torch.float32), axes.Arange(0, 1)),
        (lambda: torch.zeros(N), axes.Fill(0)),
        (lambda: torch.ones(N, dtype=torch.bool), axes.Fill(1)),
        (lambda: torch.full((N,), -1.5), axes.Fill(-1.5)),
        (lambda: torch.full((N,), fill_value=True), axes.Fill(True)),
    ],
)
def test_constructors(function: Callable[[], Tensor], expected: axes.Step) -> None:
    assert step_of(lambda t: function(), "s", x) == expected


def test_a_table_with_its_functions() -> None:
    recorded, node = value(
        lambda table, rows, cols: (table.to(torch.bool) | False)[rows, cols],
        torch.ones(B, N, dtype=torch.int64),
        torch.arange(B)[:, None],
        torch.arange(N)[None],
    )
    found = axes.step(node, "bs")
    assert isinstance(found, axes.Table)
    assert found.source is recorded.node("l_table_")
    assert found.functions[0].target == "to"
    assert found.layouts == {recorded.node("l_rows_"): "b1", recorded.node("l_cols_"): "1s"}


def test_rows_of_a_buffer() -> None:
    recorded, node = value(lambda buffer, pos: buffer[None, None, pos], torch.ones(N, N), torch.tensor([3]))
    assert axes.step(node, "11qs") == axes.Leaf(recorded.node("l_buffer_"), "qs", recorded.node("l_pos_"))


def test_inputs_and_values_without_a_sequence_are_leaves() -> None:
    recorded, node = value(lambda t: t.sum(), x)
    assert axes.step(recorded.node("l_t_"), "bhsd") == axes.Leaf(recorded.node("l_t_"), "bhsd")
    assert axes.step(node, "") == axes.Leaf(node, "")


BLOCKED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "softmax": (lambda t, i: t.softmax(-1), "bhsd", "softmax is not pointwise along the sequence axis"),
    "cumsum": (lambda t, i: t.cumsum(2), "bhsd", "cumsum is not pointwise"),
    "cat": (lambda t, i: torch.cat([t, t], 2)[:, :, :N].contiguous(), "bhsd", ""),
    "split heads": (lambda t, i: t.reshape(B, H * N, D), "bsd", "merges or splits axes"),
    "partial slice": (lambda t, i: t[:, :, 1:], "bhsd", "slices slice(1, None, None)"),
    "strided slice": (lambda t, i: t[:, :, ::2], "bhsd", "slices slice(None, None, 2)"),
    "one head": (lambda t, i: t[:, 0], "bsd", "takes item 0"),
    "permuted tokens": (lambda t, i: t[:, :, i], "bhsd", "takes item l_i_"),
    "permuted rows": (lambda t, i: t[i[:2]], "bhsd", "takes item"),
    "rows of a computed tensor": (lambda t, i: (t[0, 0] * 2)[i[:1]], "sd", "takes"),
    "a table that is computed": (lambda t, i: t[0, 0].cumsum(0)[i, i[:1]], "s", "computes a table"),
    "arange to a tensor": (lambda t, i: torch.arange(start=0, end=N), "s", "symbolic bounds"),
    "an operand that only lends its dtype": (lambda t, i: i.to(t), "s", "does not broadcast"),
    "the wrong rank": (lambda t, i: t.neg(), "bhs", "not a tensor with axes 'bhs'"),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked(name: str) -> None:
    function, layout, reason = BLOCKED[name]
    _, node = value(function, x, torch.arange(N))
    found = axes.trace(node, layout)
    assert found.blocked is not None
    assert reason in found.blocked.reason


def test_a_trace_lists_sources_computed_nodes_and_reads() -> None:
    recorded, node = value(
        lambda t, scale, valid: (t.float() * scale).transpose(1, 2) + torch.arange(N)[:, None, None],
        torch.ones(B, H, N, D, dtype=torch.int8),
        torch.tensor(0.5),
        x,
    )
    found = axes.trace(node, "bshd")
    names = {n.name for n in found.computed}
    assert found.blocked is None
    assert {n.name for n in found.sources} == {"l_t_", "arange"}
    assert names == {"float_1", "mul", "add"}
    assert (recorded.node("l_scale_"), recorded.node("mul")) in found.reads
    assert [leaf.layout for leaf in found.leaves] == ["bhsd"]
