"""The law behind the fast path: ops(x) at some positions = ops(x at those positions), on random chains of ops.

It is checked through `commute_gather` itself: both branches of one `cond` select positions of the computed value, the
pass pushes the selection of the second to the graph's inputs, and both are run on real tensors beside plain indexing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from sfi_compile.compat.dynamo import copy_graph_module
from sfi_compile.config import Config
from sfi_compile.passes import paths
from sfi_compile.passes.base import Builder, Work
from sfi_compile.passes.commute_gather import CommuteGather
from sfi_compile.passes.dataflow import DataFlow
from sfi_compile.passes.shapes import shape_of
from sfi_compile.site import MatchResult
from tests.passes.toys import record, tensor, text

B, H, N, D = 2, 3, 11, 4
F = torch.nn.functional
TAKE = torch.ops.aten.index_select.default
Extras = dict[str, Tensor]
EXTRAS: Extras = {
    "feature": tensor(D).double(),
    "head": tensor(H, 1, 1).double(),
    "row": tensor(B, 1, 1, 1).double(),
    "token": tensor(N, 1, seed=7).double(),
    "scale": torch.tensor(0.7).double(),
    "w": tensor(D, D, seed=8).double(),
    "wide": tensor(H * D, H * D, seed=9).double() / 4,
    "per_head": tensor(H, D, D, seed=10).double(),
    "table": tensor(20, D, seed=11).double(),
    "ids": torch.arange(N) * 3 % 20,
    "rotated": tensor(B, N, 2, seed=12).double(),
}


def assembled(t: Tensor, e: Extras) -> Tensor:
    """As an up-projection of latents puts keys together: one part of each head, and one that all share."""
    new = t.new_empty(B, H, N, D)
    new[..., :2] = t[..., 2:]
    new[..., 2:] = e["rotated"][:, None]
    return new


def copied(t: Tensor, e: Extras) -> Tensor:
    new = torch.zeros(B, N, H, D, dtype=t.dtype)
    new[:, :, :2].copy_(t.transpose(1, 2)[:, :, 1:])
    new[:, :, 2].copy_(t[:, 0] * 2)
    return new.transpose(1, 2)


def projected(t: Tensor, e: Extras) -> Tensor:
    flat = F.linear(t.transpose(1, 2).reshape(B, N, H * D), e["wide"])
    return flat.view(B, N, H, D).transpose(1, 2)


def rotated(t: Tensor, e: Extras) -> Tensor:
    angle = torch.arange(N)[:, None] * e["feature"]
    half = torch.cat([-t[..., 2:], t[..., :2]], -1)
    return t * angle.cos() + half * angle.sin()


STEPS: dict[str, Callable[[Tensor, Extras], Tensor]] = {
    "scale": lambda t, e: t * e["scale"],
    "feature": lambda t, e: t + e["feature"],
    "head": lambda t, e: t * e["head"],
    "row": lambda t, e: t - e["row"],
    "token": lambda t, e: t * e["token"],
    "counted": lambda t, e: t + torch.arange(3, 3 + 2 * N, 2)[:, None],
    "activation": lambda t, e: F.silu(t),
    "clamp": lambda t, e: torch.where(t > 0, t.clamp(-1, 1), e["feature"]),
    "cast": lambda t, e: (t * 4).clamp(-100, 100).to(torch.int8).to(torch.float64) * e["scale"],
    "matmul": lambda t, e: t @ e["w"],
    "matmul from the left": lambda t, e: (e["w"] @ t.transpose(2, 3)).transpose(2, 3),
    "matmul per head": lambda t, e: torch.matmul(t, e["per_head"]),
    "matmul, tokens as a batch": lambda t, e: (t.transpose(1, 2) @ e["w"]).transpose(1, 2),
    "bmm": lambda t, e: torch.stack([torch.bmm(row, e["per_head"]) for row in t.unbind(0)]),
    "linear": lambda t, e: F.linear(t, e["w"], e["feature"]),
    "linear over heads": projected,
    "einsum": lambda t, e: torch.einsum("bhsd,hde->bhse", t, e["per_head"]),
    "einsum, turned": lambda t, e: torch.einsum("bhsd,de->sbhe", t, e["w"]).permute(1, 2, 0, 3),
    "layer_norm": lambda t, e: F.layer_norm(t, (D,), e["feature"]),
    "rms_norm": lambda t, e: F.rms_norm(t, (D,), e["feature"]),
    "norm written out": lambda t, e: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6),
    "normalize": lambda t, e: F.normalize(t, dim=-1),
    "divided by a norm": lambda t, e: t / (1 + t.norm(dim=-1, keepdim=True)),
    "softmax of features": lambda t, e: t.softmax(-1),
    "mean of heads": lambda t, e: t - t.mean(1, keepdim=True),
    "sum of heads": lambda t, e: t + t.sum(dim=1).unsqueeze(1),
    "rotary": rotated,
    "interleaved": lambda t, e: torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2),
    "chunks swapped": lambda t, e: torch.cat(t.chunk(2, -1)[::-1], -1),
    "split": lambda t, e: torch.cat([t.split([1, 3], -1)[1], t.split([1, 3], dim=-1)[0]], dim=3),
    "heads unbound": lambda t, e: torch.stack(t.unbind(1)[::-1], 1),
    "heads repeated": lambda t, e: t.repeat(1, 2, 1, 1)[:, 1 : H + 1],
    "heads interleaved": lambda t, e: t.repeat_interleave(2, dim=1)[:, :H],
    "one head for all": lambda t, e: t[:, 1:2].expand(B, H, N, D),
    "one head, grouped": lambda t, e: t[:, :, None].expand(B, H, 2, N, D).reshape(B, 2 * H, N, D)[:, H:],
    "merged rows": lambda t, e: (t.reshape(B * H, N, D) * 2).view(B, H, N, D),
    "features split": lambda t, e: t.view(B, H, N, 2, 2).transpose(3, 4).reshape(B, H, N, D),
    "unit axes": lambda t, e: t.unsqueeze(2).squeeze(2)[:, :, None, :, None].reshape(B, H, N, D),
    "permuted": lambda t, e: (t.permute(3, 0, 2, 1) + 1).permute(1, 3, 2, 0).contiguous(),
    "narrow": lambda t, e: torch.cat([t.narrow(3, 1, 3), t.narrow(-1, 0, 1)], 3),
    "embedding": lambda t, e: t + F.embedding(e["ids"], e["table"]),
    "a table": lambda t, e: t * e["table"][e["ids"]],
    "assembled": assembled,
    "copied into a new tensor": copied,
}


def check(steps: list[str], positions: list[int]) -> None:
    """Both ways of selecting positions of a chain of steps, bit for bit but for the rounding of products."""

    def function(t: Tensor, e: Extras) -> Tensor:
        for name in steps:
            t = STEPS[name](t, e)
        return t * 1

    x, at = tensor(B, H, N, D, seed=3).double(), torch.tensor(positions)
    recorded = record(function, x, EXTRAS)
    output: Any = next(n for n in recorded.graph.nodes if n.op == "output")
    blocked = paths.path(output.args[0][0], 2, DataFlow(recorded.graph)).blocked
    assert blocked is None, blocked
    late, early, branch = selected(recorded.module, output.args[0][0].name, at, recorded.fresh())
    expected = function(x, EXTRAS).index_select(2, at)
    torch.testing.assert_close(late, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(early, expected, rtol=1e-12, atol=1e-12)
    computed = [n for n in branch.nodes if n.op.startswith("call")]
    assert not any(N in (shape_of(n) or ()) for n in computed), f"work on the whole sequence:\n{text(branch)}"


def selected(
    original: fx.GraphModule, name: str, at: Tensor, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor, fx.Graph]:
    """Positions of a node: as the graph stands, and with the selection pushed to the inputs (and that graph)."""
    module = copy_graph_module(original)
    graph = module.graph
    parent = next(n for n in graph.nodes if n.name == name)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        position = graph.placeholder("position")
    with graph.inserting_after(position):
        predicate = graph.placeholder("predicate")
    position.meta["example_value"] = Builder(graph).mode.from_tensor(at, static_shapes=True)
    operands = (parent, position)
    for label in ("late", "early"):
        branch = fx.Graph()
        placed = [branch.placeholder(n) for n in ("value", "position")]
        for made, given_node in zip(placed, operands, strict=True):
            made.meta["example_value"] = given_node.meta["example_value"]
        branch.output((Builder(branch).call(TAKE, placed[0], 2, placed[1]),))
        module.add_submodule(label, fx.GraphModule({}, branch))
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        branches = (graph.get_attr("late"), graph.get_attr("early"))
        output.args = (graph.call_function(torch.ops.higher_order.cond, (predicate, *branches, operands)),)
    done: Any = CommuteGather().apply(Work(Config(), module, match=MatchResult((), (), None))).graph
    with torch.no_grad():
        late, early = (done(*inputs, at, torch.tensor(flag))[0] for flag in (True, False))
    return late, early, done.early.graph


@pytest.mark.parametrize("name", STEPS)
def test_every_step(name: str) -> None:
    check([name], [4, 5])


@given(
    st.lists(st.sampled_from(list(STEPS)), min_size=2, max_size=6),
    st.lists(st.integers(0, N - 1), min_size=1, max_size=3),
)
def test_chains(steps: list[str], positions: list[int]) -> None:
    check(steps, positions)
