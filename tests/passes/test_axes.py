"""Named axes: what every kind of node is one level up, and every reason why a gather stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes import axes
from sfi_compile.passes.shapes import shape_of
from tests.passes.toys import Recorded, record, tensor

F = torch.nn.functional
B, H, Q, N = 2, 3, 4, 7


def value(function: Callable[..., Any], *args: Any) -> tuple[Recorded, fx.Node]:
    """A graph and the node of its (first) result."""
    recorded = record(function, *args)
    output = next(n for n in recorded.graph.nodes if n.op == "output")
    return recorded, output.args[0][0]


def step_of(function: Callable[..., Any], layout: str, *args: Any) -> axes.Step:
    return axes.step(value(function, *args)[1], layout, H)


x = tensor(B, H, Q, N)
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "transpose": (lambda t: t.transpose(1, 2), "bqhs", "bhqs"),
    "transpose, negative axes": (lambda t: t.transpose(-2, -1), "bhsq", "bhqs"),
    "torch.transpose": (lambda t: torch.transpose(t, 1, 2), "bqhs", "bhqs"),
    "swapaxes": (lambda t: t.swapaxes(1, 2), "bqhs", "bhqs"),
    "permute": (lambda t: t.permute(2, 0, 1, 3), "qbhs", "bhqs"),
    "permute, a tuple": (lambda t: t.permute((2, 0, 1, 3)), "qbhs", "bhqs"),
    "unsqueeze": (lambda t: (t + 1).unsqueeze(1), "b1hqs", "bhqs"),
    "squeeze": (lambda t: (t[:1] + 1).squeeze(0), "hqs", "1hqs"),
    "None": (lambda t: (t + 1)[:, :, None], "bh1qs", "bhqs"),
    "Ellipsis": (lambda t: (t + 1)[..., None, :], "bhq1s", "bhqs"),
    "full slices": (lambda t: (t + 1)[:, :, 0:Q], "bhqs", "bhqs"),
    "expand": (lambda t: (t[:1] + 1).expand(B, H, Q, N), "bhqs", "1hqs"),
    "repeat": (lambda t: (t[:, :1] + 1).repeat(1, H, 1, 1), "bhqs", "b1qs"),
    "repeat of all heads for every row": (lambda t: (t[0, :, 0] + 1).repeat(B, 1), "ms", "hs"),
    "reshape": (lambda t: (t + 1).reshape(B, 1, H, Q, N, 1), "b1hqs1", "bhqs"),
    "view": (lambda t: (t + 1).view(B, H, 1, Q, N), "bh1qs", "bhqs"),
    "rows and heads merged": (lambda t: (t + 1).reshape(B * H, Q, N), "mqs", "bhqs"),
    "rows and heads split": (lambda t: (t.reshape(B * H, Q, N) + 1).view(B, H, Q, N), "bhqs", "mqs"),
    "contiguous": (lambda t: t.contiguous(), "bhqs", "bhqs"),
    "clone": (lambda t: t.clone(), "bhqs", "bhqs"),
    "detach": (lambda t: t.detach(), "bhqs", "bhqs"),
    "result of a write": (lambda t: t.mul_(2), "bhqs", "bhqs"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_rename_axes(name: str) -> None:
    function, layout, expected = VIEWS[name]
    found = step_of(function, layout, x)
    if isinstance(found, axes.Leaf):  # an input under other axes computes nothing
        assert found.layout == layout
        return
    assert isinstance(found, axes.View)
    assert found.layout == expected
    assert len(expected) == len(shape_of(found.source) or ())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), ""), ((N,), "s"), ((Q, 1), "q1"), ((H, 1, 1), "h11"), ((B, 1, 1, 1), "b111"), ((1, H, Q, N), "1hqs")],
)
def test_pointwise_operands_broadcast(shape: tuple[int, ...], expected: str) -> None:
    recorded, node = value(lambda t, other: t * other, x, tensor(*shape))
    found = axes.step(node, "bhqs", H)
    assert found == axes.Pointwise({recorded.node("l_t_"): "bhqs", recorded.node("l_other_"): expected})


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
    assert isinstance(step_of(function, "bhqs", x), axes.Pointwise)


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
    found = axes.step(node, "bs", H)
    assert isinstance(found, axes.Table)
    assert found.source is recorded.node("l_table_")
    assert found.functions[0].target == "to"
    assert found.layouts == {recorded.node("l_rows_"): "b1", recorded.node("l_cols_"): "1s"}


def test_an_embedding_of_distances() -> None:
    """T5's bias: a table of one number a head, looked up by distance."""
    table, pos = tensor(9, H), torch.tensor([3])
    recorded, node = value(lambda w, p: F.embedding(torch.arange(N)[None] - p[:, None] + 4, w), table, pos)
    found = axes.step(node, "qsh", H)
    assert isinstance(found, axes.Table)
    assert (found.source, found.indices[1]) == (recorded.node("l_w_"), "h")
    assert list(found.layouts.values()) == ["1s"]


def test_rows_of_a_buffer() -> None:
    recorded, node = value(lambda buffer, pos: buffer[None, None, pos], torch.ones(N, N), torch.tensor([3]))
    assert axes.step(node, "11qs", H) == axes.Leaf(recorded.node("l_buffer_"), "qs", recorded.node("l_pos_"))


def test_inputs_their_parts_and_values_without_a_sequence_are_leaves() -> None:
    recorded, node = value(lambda t: (t.sum(), t[:, 0, 1:, 2:]), x)
    part = recorded.node("getitem")
    assert axes.step(recorded.node("l_t_"), "bhqs", H) == axes.Leaf(recorded.node("l_t_"), "bhqs")
    assert axes.step(part, "bqs", H) == axes.Leaf(part, "bqs"), "a view computes nothing"
    assert axes.step(node, "", H) == axes.Leaf(node, "")


BLOCKED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "softmax": (lambda t, i: t.softmax(-1), "bhqs", "softmax is not pointwise along the sequence axis"),
    "cumsum": (lambda t, i: t.cumsum(3), "bhqs", "cumsum sums over the sequence axis"),
    "flip": (lambda t, i: t.flip(3), "bhqs", "flip is not pointwise"),
    "cat": (lambda t, i: torch.cat([t, t], 3), "bhqs", ""),
    "merged with queries": (lambda t, i: (t + 1).reshape(B, H, Q * N), "bhs", "merges or splits axes"),
    "heads merged with queries": (lambda t, i: (t + 1).reshape(B, H * Q, N), "bms", "merges or splits axes"),
    "partial slice": (lambda t, i: (t + 1)[..., 1:], "bhqs", "slices slice(1, None, None)"),
    "strided slice": (lambda t, i: (t + 1)[..., ::2], "bhqs", "slices slice(None, None, 2)"),
    "one head": (lambda t, i: (t + 1)[:, 0], "bqs", "takes item 0"),
    "permuted tokens": (lambda t, i: t[..., i], "bhqs", "takes item l_i_"),
    "permuted rows": (lambda t, i: t[i[:2]], "bhqs", "takes item"),
    "rows of a computed tensor": (lambda t, i: (t[0, 0] * 2)[i[:1]], "qs", "takes"),
    "a table that is computed": (lambda t, i: t[0, 0].cumsum(0)[i[:1], i], "s", "computes a table"),
    "an embedding of a computed table": (lambda t, i: F.embedding(i % 2, t[0, 0] * 2), "sh", "computes a table"),
    "an embedding of features": (lambda t, i: F.embedding(i[:1], t[0, 0]), "qs", "looks up features"),
    "some heads repeated": (lambda t, i: (t[:, :2] + 1).repeat(1, 2, 1, 1), "bhqs", "repeat from"),
    "arange to a tensor": (lambda t, i: torch.arange(start=0, end=N), "s", "symbolic bounds"),
    "an operand that only lends its dtype": (lambda t, i: i.to(t), "s", "does not broadcast"),
    "other bits": (lambda t, i: (t + 1).view(torch.int32), "bhqs", "another dtype"),
    "the wrong rank": (lambda t, i: t.neg(), "bhs", "not a tensor with axes 'bhs'"),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked(name: str) -> None:
    function, layout, reason = BLOCKED[name]
    _, node = value(function, x, torch.arange(N))
    found = axes.trace(node, layout, H)
    assert found.blocked is not None
    assert reason in found.blocked.reason


def test_a_trace_lists_sources_computed_nodes_and_reads() -> None:
    recorded, node = value(
        lambda t, scale: (t.float() * scale).transpose(1, 2) + torch.arange(N),
        torch.ones(B, H, Q, N, dtype=torch.int8),
        torch.tensor(0.5),
    )
    found = axes.trace(node, "bqhs", H)
    assert found.blocked is None
    assert {n.name for n in found.sources} == {"l_t_", "arange"}
    assert {n.name for n in found.computed} == {"float_1", "mul", "add"}
    assert (recorded.node("l_scale_"), recorded.node("mul")) in found.reads
    assert [leaf.layout for leaf in found.leaves] == ["bhqs"]
