"""Mutation edges: what changes what in place, what a value depends on, and what must outlive dead-code elimination."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sfi_compile.passes.dataflow import DataFlow, alike, extract, mutated_argument, mutated_arguments, remove_dead
from tests.passes.toys import Recorded, minimal, operands, record, same_text, tensor, text, unchanged


@torch.library.custom_op("toys::write_both", mutates_args=("keys", "values"))
def write_both(x: Tensor, keys: Tensor, values: Tensor) -> None:
    keys.add_(x)
    values.sub_(x)


@write_both.register_fake
def _(x: Tensor, keys: Tensor, values: Tensor) -> None:
    return None


def inplace_add(c: Tensor, x: Tensor) -> None:
    c += x


def inplace_and(c: Tensor, x: Tensor) -> None:
    c &= x


def assign(c: Tensor, x: Tensor) -> None:
    c[0] = x[0]


INPLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "method": lambda c, x: c.copy_(x),
    "index_copy_": lambda c, x: c.index_copy_(0, torch.tensor([0]), x[:1]),
    "masked_fill_": lambda c, x: c.masked_fill_(x > 0, 1),
    "setitem": assign,
    "iadd": inplace_add,
    "iand": inplace_and,
    "function with underscore": lambda c, x: torch.relu_(c),
    "inplace=True": lambda c, x: torch.nn.functional.relu(c, inplace=True),
    "out=": lambda c, x: torch.add(x, 1, out=c),
    "foreach": lambda c, x: torch._foreach_add_([c], 1),
    "overload": lambda c, x: torch.ops.aten.add_.Tensor(c, x),
    "overload packet": lambda c, x: torch.ops.toys.write_both(x, c, c),
    "through a view": lambda c, x: c.t().zero_(),
    "through .T": lambda c, x: c.T.zero_(),
    "through .data": lambda c, x: c.data.zero_(),
    "through an item": lambda c, x: c[0].zero_(),
    "through a function's view": lambda c, x: torch.swapaxes(c, 0, 1).zero_(),
    "through an operator's view": lambda c, x: torch.ops.aten.select(c, 0, 1).zero_(),
    "through one of several views": lambda c, x: torch.tensor_split(c, 2)[0].zero_(),
    "through a cast to the same dtype": lambda c, x: c.long().zero_(),
}


@pytest.mark.parametrize("name", INPLACE)
def test_writes_in_place_are_seen_and_kept(name: str) -> None:
    def function(c: Tensor, x: Tensor) -> Tensor:
        INPLACE[name](c, x)
        return x * 2

    recorded = record(function, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
    graph = recorded.graph
    flow = DataFlow(graph)
    cache = recorded.node("l_c_")
    (write,) = flow.writes(cache)
    assert flow.origin(mutated_argument(write) or write) is cache
    # The survivors still write: run what is left and look at the cache.
    remove_dead(graph)
    recorded.module.recompile()
    expected, found = recorded.fresh(), recorded.fresh()
    c, x = (recorded.index(name) for name in ("l_c_", "l_x_"))
    function(expected[c], expected[x])
    recorded.module(*found)
    assert torch.equal(found[c], expected[c])


def test_inputs_that_share_memory() -> None:
    """Two views of one tensor are two inputs; a write into one is a write into the other."""

    def function(one: Tensor, two: Tensor) -> Tensor:
        one.zero_()
        return two * 2

    big = torch.ones(4, 3)
    recorded: list[tuple[DataFlow, list[torch.fx.Node]]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        recorded.append((DataFlow(module.graph), [n for n in module.graph.nodes if n.op == "placeholder"]))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(big[:3], big[1:])
    ((flow, (one, two)),) = recorded
    assert flow.writes(one) == flow.writes(two) != ()


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: torch.ops.aten.bitwise_and(c, x),
        lambda c, x: c & x,
        lambda c, x: c | x,
        lambda c, x: c.bitwise_not(),
        lambda c, x: c.index_copy(0, torch.tensor([0]), x[:1]),
        lambda c, x: torch.nn.functional.relu(c, inplace=False),
        lambda c, x: c.float().zero_(),
    ],
)
def test_out_of_place_leaves_inputs_alone(function: Callable[[Tensor, Tensor], Any]) -> None:
    recorded = record(function, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
    flow = DataFlow(recorded.graph)
    assert not flow.writes(recorded.node("l_c_"))


def test_operators_named_after_keywords_are_not_in_place() -> None:
    """operator.and_ and operator.or_ end in an underscore."""
    recorded = record(lambda a, b: ((a & b) | b, ~a), torch.tensor([True]), torch.tensor([False]))
    assert [mutated_argument(n) for n in recorded.graph.nodes] == [None] * len(recorded.graph.nodes)


def test_an_operator_may_write_several_arguments_by_keyword() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        write_both(x, values=b, keys=a)
        return a + b

    recorded = record(function, torch.ones(2), torch.zeros(2), torch.zeros(2))
    flow = DataFlow(recorded.graph)
    call = next(n for n in flow.nodes if "write_both" in n.name)
    assert [n.name for n in mutated_arguments(call)] == ["l_a_", "l_b_"]
    assert flow.writes(recorded.node("l_a_")) == flow.writes(recorded.node("l_b_")) == (call,)


def test_fx_alone_deletes_cache_writes() -> None:
    """Why `remove_dead` exists: FX takes an in-place method call without users for dead code."""
    alone, ours = (record(minimal, *operands()).graph for _ in range(2))
    alone.eliminate_dead_code()
    remove_dead(ours)
    assert "index_copy_" not in text(alone)
    assert text(ours).count("index_copy_(2") == 2


class TestRemoveDead:
    """What no output needs goes, writes into tensors of the graph's own included; what is needed stays in order."""

    @staticmethod
    def left(function: Callable[..., Any], *args: Tensor) -> tuple[str, Recorded]:
        recorded = record(function, *args)
        remove_dead(recorded.graph)
        recorded.graph.lint()
        recorded.module.recompile()
        return text(recorded.graph), recorded

    def test_a_new_tensor_that_nobody_reads(self) -> None:
        def function(x: Tensor) -> Tensor:
            new = torch.zeros(3)
            new[:2] = x[:2]
            new.mul_(2)
            return x + 1

        left, _ = self.left(function, tensor(3))
        assert [line.split(" = ")[0] for line in left.splitlines()[1:-1]] == ["add"]

    def test_a_new_tensor_that_is_read_keeps_all_its_writes(self) -> None:
        def function(x: Tensor) -> Tensor:
            new = torch.zeros(3)
            new[:2] = x[:2]
            view = new[1:]
            view.mul_(2)
            return x + new

        left, recorded = self.left(function, tensor(3))
        assert "setitem" in left
        assert "mul_" in left
        assert torch.equal(recorded.module(*recorded.fresh())[0], function(tensor(3)))

    def test_a_write_after_the_last_read(self) -> None:
        """It goes, or stays, but what was read before it is the same."""

        def function(x: Tensor) -> Tensor:
            new = x * 2
            out = new + 1
            new.zero_()
            return out

        _, recorded = self.left(function, tensor(3))
        assert torch.equal(recorded.module(*recorded.fresh())[0], function(tensor(3)))

    def test_a_chain_of_new_tensors(self) -> None:
        """One is written from another that is written: all go if the last is not read, and all stay if it is."""

        def function(x: Tensor, flag: bool) -> Tensor:
            one, two = torch.zeros(3), torch.zeros(3)
            one.copy_(x)
            two.copy_(one)
            return x + two if flag else x + 1

        for flag in (True, False):
            left, recorded = self.left(lambda x, flag=flag: function(x, flag), tensor(3))
            assert left.count("copy_(") == 2 * flag
            assert torch.equal(recorded.module(*recorded.fresh())[0], function(tensor(3), flag))

    def test_writes_into_inputs_stay(self) -> None:
        def function(x: Tensor, c: Tensor) -> Tensor:
            c[0].add_(x[0])
            return x + 1

        left, recorded = self.left(function, tensor(3), tensor(3))
        assert "add_(" in left
        found, expected = recorded.fresh(), recorded.fresh()
        recorded.module(*found)
        function(*(expected[recorded.index(n)] for n in ("l_x_", "l_c_")))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_mutation_edges_lead_from_write_to_later_readers() -> None:
    def function(x: Tensor) -> Tensor:
        before = x * 2
        view = x[0]
        x.add_(1)
        return before + view * 3

    recorded = record(function, tensor(2, 2))
    flow = DataFlow(recorded.graph)
    edges = {(a.name, b.name) for a, b, kind in flow.digraph.edges(data="kind") if kind == "mutation"}
    assert edges == {("add_", "mul_1")}, "the product of the view reads after the write; `before` does not"
    before, x = recorded.node("before"), recorded.node("l_x_")
    assert flow.reaching_writes(x, before) == ()
    assert flow.reaching_writes(recorded.node("view"), recorded.node("mul_1")) == (recorded.node("add_"),)
    assert [n.name for n in flow.slice_of(before)] == ["l_x_", "before"]
    assert [n.name for n in flow.slice_of(recorded.node("mul_1"))] == ["l_x_", "view", "add_", "mul_1"]


def test_the_attention_slice_holds_the_writes() -> None:
    recorded = record(minimal, *operands())
    flow = DataFlow(recorded.graph)
    attention = recorded.node("scaled_dot_product_attention")
    assert {"index_copy_", "index_copy__1", "l_k_", "l_v_"} <= {n.name for n in flow.slice_of(attention)}


class TestDecides:
    """Whether a predicate can be evaluated once, before all sites."""

    @staticmethod
    def flow(function: Callable[..., Any]) -> tuple[DataFlow, dict[str, fx.Node]]:
        recorded = record(function, tensor(3), torch.tensor(True))
        return DataFlow(recorded.graph), {n.name: n for n in recorded.graph.nodes}

    def test_an_independent_predicate_that_comes_first(self) -> None:
        flow, n = self.flow(lambda x, flag: (torch.any(flag), x.sin(), x.cos()))
        assert flow.decides(n["any_1"], [n["sin"], n["cos"]])

    def test_not_one_that_comes_later(self) -> None:
        flow, n = self.flow(lambda x, flag: (x.sin(), torch.any(flag), x.cos()))
        assert not flow.decides(n["any_1"], [n["sin"], n["cos"]])
        assert flow.decides(n["any_1"], [n["cos"]])

    def test_not_one_that_reads_a_site(self) -> None:
        flow, n = self.flow(lambda x, flag: (x.sin() > 0).any() & flag)
        assert not flow.decides(n["and_"], [n["sin"]])

    def test_not_one_that_reads_what_a_site_wrote(self) -> None:
        def function(x: Tensor, flag: Tensor) -> Tensor:
            x.sin_()
            return torch.any(x > 0)

        flow, n = self.flow(function)
        assert not flow.decides(n["any_1"], [n["sin_"]])


class TestExtract:
    """One value of a graph, computed early and without side effects."""

    def test_the_value_before_the_write(self) -> None:
        def function(length: Tensor, x: Tensor) -> Tensor:
            position = torch.arange(1) + length
            length.add_(1)
            return x * position

        recorded = record(function, torch.tensor(4), tensor(1))
        with unchanged(recorded.graph):
            module, inputs = extract(recorded.module, [recorded.node("position")])
        assert [n.name for n in inputs] == ["l_length_"]
        length = torch.tensor(4)
        assert module(length)[0].tolist() == [4]
        assert length.item() == 4
        assert "add_" not in text(module.graph)

    def test_the_value_after_the_write_leaves_the_input_alone(self) -> None:
        def function(length: Tensor) -> Tensor:
            view = length[None]
            length.add_(1)
            return view * 10

        recorded = record(function, torch.tensor(4))
        module, _ = extract(recorded.module, [recorded.node("mul"), recorded.node("l_length_")])
        same_text(
            module.graph,
            """
            (l_length_)
            clone = l_length_.clone()
            getitem = getitem(clone, None)
            add_ = clone.add_(1)
            mul = mul(getitem, 10)
            return (mul, clone)
            """,
        )
        length = torch.tensor(4)
        assert [value.tolist() for value in module(length)] == [[50], 5]
        assert module(length)[0].tolist() == [50], "twice is the same"
        assert length.item() == 4

    def test_the_whole_graph_runs_as_before(self) -> None:
        recorded = record(minimal, *operands())
        expected = copy.deepcopy(recorded.module)(*recorded.fresh())
        extract(recorded.module, [recorded.node("index_copy_")])
        assert torch.equal(recorded.module(*recorded.fresh())[0], expected[0])


def test_what_is_computed_alike_from_one_input_each() -> None:
    """Counters of layers: equal inputs mean equal positions; anything else stands for itself."""

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        one, two = torch.arange(1) + a, torch.arange(1) + b
        other, both = torch.arange(1) + c + 1, torch.arange(1) + a + b
        d.add_(1)
        return one, two, other, both, torch.arange(1) + d, torch.arange(1) + e

    recorded = record(function, *(torch.tensor(i) for i in range(4)), torch.tensor([4]))
    output = next(n for n in recorded.graph.nodes if n.op == "output")
    groups = alike(DataFlow(recorded.graph), output.args[0])
    assert [node.name for _, node in groups[0]] == ["l_a_", "l_b_"]
    assert [len(group) for group in groups] == [2, 1, 1, 1, 1]
    assert [node for group in groups for node, _ in group] == list(output.args[0])
