"""The law behind the mask of a fast step: gather(ops(x)) = ops(gather(x)), bit for bit and dtype for dtype.

It is checked through `commute_gather` itself: both branches of one `cond` gather from the computed value, the pass
pushes the gather of the second to the graph's inputs, and both are run on real tensors beside plain indexing.
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
from sfi_compile.passes import axes
from sfi_compile.passes.base import Builder, Work
from sfi_compile.passes.commute_gather import CommuteGather
from sfi_compile.passes.shapes import shape_of
from sfi_compile.site import MatchResult
from tests.passes.toys import Recorded, record, tensor, text

F = torch.nn.functional
B, H, Q, N, S = 2, 3, 2, 7, 5
INDEX = st.lists(st.integers(-1, N - 1), min_size=B * H * S, max_size=B * H * S).map(
    lambda flat: torch.tensor(flat).reshape(B, H, S)
)
EXTRAS = {
    "scale": torch.tensor(0.3),
    "low": torch.tensor(-3e4, dtype=torch.bfloat16),
    "pos": torch.tensor([4]),
    "places": torch.tensor([3, 4]),
    "positions": torch.tensor([2, 6]),
    "row": tensor(B, 1, 1, 1),
    "head": tensor(H, 1, 1),
    "valid": tensor(B, 1, 1, N) > 0,
    "by_head": tensor(B, H, Q, N) > 0,
    "merged": tensor(B * H, 1, N) > 0,
    "slopes": tensor(H, 1, N).bfloat16(),
    "table": (tensor(B, N) > 0).long(),
    "tril": torch.ones(N, N, dtype=torch.bool).tril(),
    "distances": tensor(2 * N, H),
}
Extras = dict[str, Tensor]

MASKS: list[Callable[[Extras], Tensor]] = [
    lambda e: (torch.arange(N) <= e["pos"])[None, None, None],
    lambda e: (torch.arange(N)[None] < e["positions"][:, None])[:, None, None],
    lambda e: (torch.arange(20, 20 - 2 * N, -2) > 12).view(1, 1, 1, N),
    lambda e: (torch.arange(N, dtype=torch.bfloat16) * 1.01 > e["scale"])[None, None, None],
    lambda e: e["valid"],
    lambda e: e["tril"][None, None, e["pos"]],
    lambda e: torch.ones(1, 1, 1, N, dtype=torch.bool),
    lambda e: torch.full((N,), fill_value=0.0)[None, None, None] > e["row"],
    lambda e: e["table"].to(torch.bool)[torch.arange(B)[:, None, None, None], torch.arange(N)[None, None, None]],
    lambda e: e["table"][torch.arange(B)[:, None, None, None], torch.arange(-N, 0)] > 0,
    # of several queries
    lambda e: (torch.arange(N) <= e["places"][:, None])[None, None],
    lambda e: e["tril"][None, None, e["places"]],
    lambda e: (torch.arange(N)[:, None] <= e["places"]).transpose(0, 1)[None, None],
    # of heads
    lambda e: e["by_head"],
    lambda e: e["by_head"][:, :, :1] ^ e["valid"],
    lambda e: e["merged"].view(B, H, 1, N),
    lambda e: (e["merged"] & (torch.arange(N) < 5)).reshape(B, H, 1, N),
    lambda e: (e["slopes"] * torch.arange(N) > 1)[None],
    lambda e: (e["slopes"] > 0).repeat(B, 1, 1).view(B, H, 1, N),
    lambda e: torch.arange(N) * e["head"] > e["scale"] + torch.zeros(1, 1, 1, 1),
    lambda e: F.embedding((torch.arange(N) - e["places"][:, None]) + N, e["distances"]).permute(2, 0, 1)[None] > 0,
]
COMBINED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a & b,
    lambda a, b: a | ~b,
    torch.logical_and,
    lambda a, b: a == b,
    lambda a, b: torch.where(a, b, ~b),
]
FINISHED: list[Callable[[Tensor, Extras], Tensor]] = [
    lambda m, e: m,
    lambda m, e: torch.where(m, 0.0, float("-inf")),
    lambda m, e: (~m).to(torch.bfloat16) * e["low"],
    lambda m, e: m.float() * e["row"] + torch.arange(N),
    lambda m, e: torch.where(m, e["slopes"], -1e4),
    lambda m, e: m.expand(B, H, Q, N).reshape(B * H, Q, N).to(torch.float16).view(B, H, Q, N),
    lambda m, e: (m.transpose(2, 3).contiguous() * 1.5).permute(0, 1, 3, 2),
    lambda m, e: torch.zeros(1, 1, 1, N).masked_fill(m, -1e9),
]


def value(function: Callable[..., Any], *args: Any) -> tuple[Recorded, fx.Node]:
    """A graph and the node of its result."""
    recorded = record(function, *args)
    output: Any = next(n for n in recorded.graph.nodes if n.op == "output")
    return recorded, output.args[0][0]


def gathered(recorded: Recorded, node: fx.Node, layout: str, index: Tensor) -> tuple[Tensor, Tensor, fx.Graph]:
    """`node` gathered at `index`: as the graph stands, and with the gather pushed to the inputs (and that graph)."""
    module = copy_graph_module(recorded.module)
    graph = module.graph
    parent = next(n for n in graph.nodes if n.name == node.name)
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        index_node = graph.placeholder("index")
    with graph.inserting_after(index_node):
        predicate = graph.placeholder("predicate")
    index_node.meta["example_value"] = Builder(graph).mode.from_tensor(index, static_shapes=True)
    operands = (parent, index_node)
    for name in ("late", "early"):
        branch = fx.Graph()
        inputs = [branch.placeholder(n) for n in ("value", "index")]
        for made, original in zip(inputs, operands, strict=True):
            made.meta["example_value"] = original.meta["example_value"]
        branch.output((Builder(branch).call(torch.ops.sfi.gather.default, *inputs, layout),))
        module.add_submodule(name, fx.GraphModule({}, branch))
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        branches = (graph.get_attr("late"), graph.get_attr("early"))
        cond = graph.call_function(torch.ops.higher_order.cond, (predicate, *branches, operands))
    output.args = (cond,)
    done: Any = CommuteGather().apply(Work(Config(), module, match=MatchResult((), (), None))).graph
    late, early = (done(*recorded.fresh(), index, torch.tensor(flag))[0] for flag in (True, False))
    return late, early, done.early.graph


def check(function: Callable[..., Any], args: tuple[Any, ...], index: Tensor, expected: Tensor) -> None:
    recorded, node = value(function, *args)
    layout = axes.named("bhqs", shape_of(node) or ())
    assert axes.trace(node, layout, H).blocked is None
    late, early, branch = gathered(recorded, node, layout, index)
    assert early.dtype == late.dtype == expected.dtype
    assert torch.equal(late.expand_as(expected), expected)
    assert torch.equal(early.expand_as(expected), expected), text(branch)
    computed = [n for n in branch.nodes if n.op.startswith("call")]
    assert not any(N in (shape_of(n) or ()) for n in computed), f"work on the whole sequence:\n{text(branch)}"


Atom = Callable[[Extras], Tensor]
Finish = Callable[[Tensor, Extras], Tensor]


def check_mask(first: Atom, rest: list[tuple[Atom, Callable[..., Tensor]]], finish: Finish, index: Tensor) -> None:
    def function(e: Extras) -> tuple[Tensor, Tensor]:
        mask = first(e)
        for atom, combine in rest:
            mask = combine(mask, atom(e))
        return finish(mask, e).clone(), e["pos"] * 1  # a graph has at least one input

    full = function(EXTRAS)[0]
    at = index.clamp_min(0)[:, :, None].expand(B, H, full.shape[2], S)
    check(function, (EXTRAS,), index, full.expand(B, H, -1, N).gather(3, at))


def some_index() -> Tensor:
    """Positions and empty slots, in another order for every row and head."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(N + 1, generator=generator)[:S] - 1 for _ in range(B * H)]).reshape(B, H, S)


@pytest.mark.parametrize("atom", range(len(MASKS)))
def test_every_mask(atom: int) -> None:
    check_mask(MASKS[atom], [], FINISHED[0], some_index())


@pytest.mark.parametrize("finish", range(len(FINISHED)))
def test_every_kind_of_mask(finish: int) -> None:
    check_mask(MASKS[0], [(MASKS[4], COMBINED[0])], FINISHED[finish], some_index())


@given(
    st.sampled_from(MASKS),
    st.lists(st.tuples(st.sampled_from(MASKS), st.sampled_from(COMBINED)), max_size=3),
    st.sampled_from(FINISHED),
    INDEX,
)
def test_chains_of_a_mask(
    first: Atom, rest: list[tuple[Atom, Callable[..., Tensor]]], finish: Finish, index: Tensor
) -> None:
    check_mask(first, rest, finish, index)
