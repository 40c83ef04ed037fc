"""One axis through a graph: what `step` says of every kind of op, and what it must not follow an axis through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes import along, paths
from sfi_compile.passes.dataflow import DataFlow
from tests.passes.toys import Recorded, record, tensor

B, H, N, D = 2, 3, 7, 4
F = torch.nn.functional


def result(function: Callable[..., Any], *args: Any) -> tuple[Recorded, fx.Node, DataFlow]:
    """A graph, the node of its (first) result, and its data flow."""
    recorded = record(function, *args)
    output: Any = next(n for n in recorded.graph.nodes if n.op == "output")
    return recorded, output.args[0][0], DataFlow(recorded.graph)


def step_of(function: Callable[..., Any], axis: int, *args: Any) -> along.Step:
    _, node, flow = result(function, *args)
    return along.step(node, axis, flow)


x, w = tensor(B, H, N, D), tensor(D, D)
FOLLOWED: dict[str, tuple[Callable[..., Any], int, int | None]] = {
    # name: (op of x [B, H, N, D], axis of the result, axis of x; None: it lacks the axis)
    "transpose": (lambda t, w: t.transpose(1, 2), 1, 2),
    "transpose, other axes": (lambda t, w: t.transpose(0, 1), 2, 2),
    "transpose, negative": (lambda t, w: torch.swapaxes(t, -2, -1), 3, 2),
    "permute": (lambda t, w: t.permute(2, 0, 1, 3), 0, 2),
    "permute, a tuple": (lambda t, w: t.permute((0, 2, 3, 1)), 1, 2),
    "permute, a keyword": (lambda t, w: t.permute(dims=(0, 2, 3, 1)), 1, 2),
    "view": (lambda t, w: t.view(B, H, N, 2, 2), 2, 2),
    "merged heads": (lambda t, w: t.reshape(B * H, N, D), 1, 2),
    "merged features": (lambda t, w: t.transpose(1, 2).reshape(B, N, H * D), 1, 2),
    "split heads": (lambda t, w: t[:, 0].unflatten(-1, (2, 2)), 1, 2),
    "flatten": (lambda t, w: t.flatten(0, 1), 1, 2),
    "unsqueeze": (lambda t, w: t.unsqueeze(2), 3, 2),
    "squeeze": (lambda t, w: t[:, :1].squeeze(1), 1, 2),
    "expand": (lambda t, w: t[:, :1].expand(B, 5, N, D), 2, 2),
    "expand, a new axis": (lambda t, w: t.expand(5, B, H, N, D), 3, 2),
    "expanded along it": (lambda t, w: t[:, :, :1].expand(B, H, N, D), 2, None),
    "repeat": (lambda t, w: t.repeat(1, 2, 1, 1), 2, 2),
    "repeat_interleave": (lambda t, w: t.repeat_interleave(2, dim=1), 2, 2),
    "narrow features": (lambda t, w: t.narrow(3, 1, 2), 2, 2),
    "slice features": (lambda t, w: t[..., 1:3], 2, 2),
    "slice rows": (lambda t, w: t[1:], 2, 2),
    "one head": (lambda t, w: t[:, 1], 1, 2),
    "one head, an ellipsis": (lambda t, w: t[:, 1, ..., :2], 1, 2),
    "a new axis": (lambda t, w: t[:, :, None], 3, 2),
    "all of it": (lambda t, w: t[:, :, 0:N], 2, 2),
    "pointwise": (lambda t, w: t * 2, 2, 2),
    "activation": (lambda t, w: F.silu(t), 2, 2),
    "cast": (lambda t, w: t.to(torch.float16), 2, 2),
    "linear": (lambda t, w: F.linear(t, w), 2, 2),
    "matmul": (lambda t, w: t @ w, 2, 2),
    "matmul, a batch axis": (lambda t, w: t.transpose(1, 2) @ w, 1, 2),
    "matmul from the left": (lambda t, w: w @ t.transpose(2, 3), 3, 2),
    "mT": (lambda t, w: t.mT * 1, 3, 2),
    "mH": (lambda t, w: t.mH * 1, 2, 3),
    "T": (lambda t, w: t[0, 0].T * 1, 1, 2),
    "H": (lambda t, w: t[0, 0].H * 1, 1, 2),
    "bmm": (lambda t, w: torch.bmm(t[0], w.expand(H, D, D)), 1, 2),
    "einsum": (lambda t, w: torch.einsum("bhsd,de->bseh", t, w), 1, 2),
    "mean": (lambda t, w: t.mean(-1, keepdim=True), 2, 2),
    "mean, dropped": (lambda t, w: t.mean(1), 1, 2),
    "sum of two axes": (lambda t, w: t.sum((1, 3)), 1, 2),
    "softmax of features": (lambda t, w: t.softmax(-1), 2, 2),
    "norm": (lambda t, w: t.norm(dim=-1, keepdim=True), 2, 2),
    "normalize": (lambda t, w: F.normalize(t, dim=-1), 2, 2),
    "layer_norm": (lambda t, w: F.layer_norm(t, (D,)), 2, 2),
    "rms_norm": (lambda t, w: F.rms_norm(t, (D,)), 2, 2),
    "cat of features": (lambda t, w: torch.cat([t, t[..., :1]], -1), 2, 2),
    "cat of heads": (lambda t, w: torch.cat([t, t[:, :1]], 1), 2, 2),
    "stack": (lambda t, w: torch.stack([t, t * 2], 2), 3, 2),
    "stack after it": (lambda t, w: torch.stack([t, t * 2], -1), 2, 2),
    "split": (lambda t, w: t.split(2, -1)[1], 2, 2),
    "chunk": (lambda t, w: t.chunk(2, dim=-1)[0], 2, 2),
    "unbind": (lambda t, w: t.unbind(1)[0], 1, 2),
    "unbind after it": (lambda t, w: t.unbind(3)[0], 2, 2),
}


def whence(node: fx.Node, axis: int, flow: DataFlow, root: fx.Node) -> set[int]:
    """Axes of the input that the axis comes from, through intermediate nodes."""
    found = paths.path(node, axis, flow)
    assert found.blocked is None, found.blocked
    assert {leaf.source for leaf in found.leaves} <= {root}
    return {leaf.axis for leaf in found.leaves}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    function, axis, expected = FOLLOWED[name]
    recorded, node, flow = result(function, x, w)
    assert whence(node, axis, flow, recorded.node("l_t_")) == ({expected} - {None})


BLOCKED: dict[str, tuple[Callable[..., Any], int]] = {
    "softmax": (lambda t, i: t.softmax(2), 2),
    "cumsum": (lambda t, i: t.cumsum(2), 2),
    "cumsum of another axis": (lambda t, i: t.cumsum(1), 2),  # could be followed; nobody does it
    "flip": (lambda t, i: t.flip(2), 2),
    "roll": (lambda t, i: t.roll(1, 2), 2),
    "sort": (lambda t, i: t.sort(2).values, 2),
    "normalize": (lambda t, i: F.normalize(t, dim=2), 2),
    "normalize, its default": (lambda t, i: F.normalize(t[0], p=2.0)[:, :, :], 1),
    "layer_norm": (lambda t, i: F.layer_norm(t, (N, D)), 2),
    "linear": (lambda t, i: F.linear(t.mT, torch.ones(N, N)), 3),
    "contracted and made anew": (lambda t, i: torch.ones(N, N) @ t, 2),
    "einsum with itself": (lambda t, i: torch.einsum("bhsd,bhsd->bhs", t, t), 2),
    "einsum, a diagonal": (lambda t, i: torch.einsum("ss->s", torch.ones(N, N) * t[0, 0, :, :1]), 0),
    "merged": (lambda t, i: t.reshape(B, H * N, D), 1),
    "merged with features": (lambda t, i: t.reshape(B, H, N * D), 2),
    "split": (lambda t, i: torch.cat([t, t[:, :, :1]], 2).reshape(B, H, 2, 4, D), 3),
    "split of a merged axis": (lambda t, i: t.reshape(B, H * N, D).view(B, N, H, D), 1),
    "a part": (lambda t, i: t[:, :, 1:], 2),
    "every other": (lambda t, i: t[:, :, ::2], 2),
    "all but the last": (lambda t, i: t[:, :, :-1], 2),
    "narrow": (lambda t, i: t.narrow(2, 1, 3), 2),
    "narrow of all": (lambda t, i: t.narrow(2, 0, N), 2),
    "repeat": (lambda t, i: t[:, :, :4].repeat(1, 1, 2, 1), 2),
    "repeat_interleave": (lambda t, i: t.repeat_interleave(2, dim=2), 2),
    "repeat_interleave of everything": (lambda t, i: t.repeat_interleave(2), 0),
    "positions picked": (lambda t, i: t[:, :, i], 2),
    "index_select": (lambda t, i: t.index_select(2, i), 2),
    "gather": (lambda t, i: t.gather(2, i[None, None, :, None].expand(B, H, N, D)), 2),
    "by a bool mask": (lambda t, i: t[:, :, torch.arange(N) >= 0], 2),
    "grows": (lambda t, i: torch.cat([t, t[:, :, :1]], 2), 2),
    "stacked": (lambda t, i: torch.stack([t, t], 2), 2),
    "cut": (lambda t, i: t.split(4, 2)[0], 2),
    "chunked": (lambda t, i: t.chunk(2, 2)[1], 2),
    "convolved": (lambda t, i: F.conv1d(t[0].mT, torch.ones(D, D, 3), padding=1), 2),
    "triangle": (lambda t, i: t[..., :1].expand(B, H, N, N).tril(), 2),
    "other bits": (lambda t, i: t.view(torch.int32), 2),
    "pooled": (lambda t, i: F.avg_pool1d(t[0].mT, 3, 1, 1), 2),
    "topk": (lambda t, i: t.topk(N, 2).values, 2),
    "swapped with heads": (lambda t, i: t.reshape(B, N, H, D), 1),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked(name: str) -> None:
    function, axis = BLOCKED[name]
    _, node, flow = result(lambda t, i: (function(t, i), t.mean() + i.sum()), x, torch.arange(N))
    assert paths.path(node, axis, flow).blocked is not None


def test_growing_says_so() -> None:
    _, node, flow = result(lambda t, new: torch.cat([t, new], 2), x, x[:, :, :1])
    found = paths.path(node, 2, flow).blocked
    assert found is not None
    assert found.grows


def test_broadcast_operands_lack_the_axis() -> None:
    recorded, node, flow = result(lambda t, w, one: t * w + one, x, tensor(D), tensor(1, 1, 1))
    found = paths.path(node, 2, flow)
    assert {n.name for n in found.fixed} == {"l_w_", "l_one_"}
    assert found.leaves == (along.Leaf(recorded.node("l_t_"), 2),)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t - t.amax(2, keepdim=True),
        lambda t: (t @ t.transpose(2, 3)) @ t,
        lambda t: t / t.cumsum(2)[:, :, -1:],
    ],
)
def test_what_mixes_positions_and_then_broadcasts_is_fixed(function: Callable[[Tensor], Tensor]) -> None:
    """Whether such an operand changes with the step is for whoever asked to find out."""
    recorded, node, flow = result(function, x)
    fixed = paths.path(node, 2, flow).fixed
    assert any(recorded.node("l_t_") in flow.slice_of(n) for n in fixed)


def test_what_a_path_lists() -> None:
    recorded, node, flow = result(
        lambda t, scale, table, i: (t.float() * scale).transpose(1, 2) + F.embedding(i, table)[None, :, None],
        torch.ones(B, H, N, D, dtype=torch.int8),
        torch.tensor(0.5),
        tensor(9, D),
        torch.arange(N),
    )
    found = paths.path(node, 1, flow)
    assert {leaf.source.name for leaf in found.leaves} == {"l_t_", "l_i_"}
    assert {n.name for n in found.fixed} == {"l_scale_", "l_table_"}
    assert (recorded.node("l_table_"), "embedding") in {(a, b.name) for a, b in found.reads}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.arange(N), along.Count(0, 1)),
        (lambda: torch.arange(2, 2 + N), along.Count(2, 1)),
        (lambda: torch.arange(9, -5, -2), along.Count(9, -2)),
    ],
)
def test_counted(function: Callable[[], Tensor], expected: along.Count) -> None:
    assert step_of(lambda t: function(), 0, x) == expected


def halves(t: Tensor, r: Tensor) -> Tensor:
    """As an up-projection of latents puts keys together."""
    new = t.new_empty(B, H, N, D + 2)
    new[..., :D] = t
    new[..., D:] = r
    return new


def copied(t: Tensor, r: Tensor) -> Tensor:
    new = torch.zeros(B, H, N, D + 2)
    new[:, :, :, :D].copy_(t)
    new[:, :, :, D:].copy_(r)
    return new


def added(t: Tensor, r: Tensor) -> Tensor:
    new = torch.zeros(B, H, N, D)
    new.add_(t)
    return new


def over_tokens(t: Tensor, r: Tensor) -> Tensor:
    new = t.new_empty(B, H, N, D)
    new[:, :, :3] = t[:, :, :3]
    new[:, :, 3:] = t[:, :, 3:]
    return new


def one_value_for_all(t: Tensor, r: Tensor) -> Tensor:
    """What is written lacks the axis: it broadcasts."""
    new = t.new_empty(B, H, N, D)
    new[..., :] = t[:, :, :1]
    return new


@pytest.mark.parametrize("function", [halves, copied])
def test_assembled_from_parts(function: Callable[..., Tensor]) -> None:
    _, node, flow = result(function, x, tensor(B, H, N, 2))
    found = paths.path(node, 2, flow)
    assert found.blocked is None
    assert {leaf.source.name for leaf in found.leaves} == {"l_t_", "l_r_"}
    assert found.filling == set(flow.writes(node))


@pytest.mark.parametrize("function", [added, over_tokens, one_value_for_all])
def test_not_assembled(function: Callable[..., Tensor]) -> None:
    _, node, flow = result(function, x, tensor(B, H, N, 2))
    assert paths.path(node, 2, flow).blocked is not None
