"""specialise: sizes become numbers and other numbers stay; looking pins nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from sfi_compile.compat.dynamo import example
from sfi_compile.config import Config
from sfi_compile.passes.base import Work
from sfi_compile.passes.specialise import Specialise
from tests.passes.toys import compiled, minimal, operands, record, same_text, text, unchanged


def counted(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, count: int
) -> tuple[Tensor, int]:
    """Uses a size as a number, and a number that is no size."""
    return minimal(q, k, v, keys, values, pos) * count + keys.shape[0], count + 1


def inputs() -> tuple[Any, ...]:
    return (*operands(batch=2, size=8, dim=4), 7)


def symbols(graph: fx.Graph) -> list[str]:
    """Inputs and calls whose value is a symbolic number."""
    return [n.name for n in graph.nodes if isinstance(example(n), torch.SymInt)]


def test_sizes_become_numbers_and_inputs_keep_their_places() -> None:
    recorded = record(counted, *inputs(), dynamic=True)
    count = recorded.node("l_count_")
    names = [n.name for n in recorded.graph.nodes if n.op == "placeholder"]
    assert len(names) > 7, "Dynamo hands over sizes as inputs"
    with unchanged(recorded.graph):
        graph = Specialise().apply(Work(Config(), recorded.module)).graph.graph
    assert [n.name for n in graph.nodes if n.op == "placeholder"] == names
    same_text(
        graph,
        f"""
        ({", ".join(names)})
        index_copy_ = l_keys_.index_copy_(2, l_pos_, l_k_)
        index_copy__2 = l_values_.index_copy_(2, l_pos_, l_v_)
        arange = arange(8)
        le = le(arange, l_pos_)
        getitem = getitem(le, (None, None, None))
        scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_keys_, l_values_, attn_mask=getitem)
        mul = mul(scaled_dot_product_attention, l_count_)
        add = add(mul, 2)
        add_2 = add(l_count_, 1)
        return (add, add_2)
        """,
    )
    assert isinstance(example(count), torch.SymInt), "pinning a counter would mean a new graph at every step"
    assert not count.meta["example_value"].node.shape_env.replacements.get(example(count).node.expr)


def test_looking_pins_nothing() -> None:
    recorded = record(counted, *inputs(), dynamic=True)
    environment = example(recorded.node("l_count_")).node.shape_env
    guards = len(environment.guards)
    looked = Specialise(pin=False).apply(Work(Config(), recorded.module)).graph
    assert "arange(8)" in text(looked.graph)
    assert (len(environment.guards), environment.replacements) == (guards, {})
    pinned = Specialise().apply(Work(Config(), recorded.module)).graph
    assert text(pinned.graph) == text(looked.graph)
    assert sorted(map(int, environment.replacements.values())) == [2, 4, 8]


def test_without_symbols_nothing_changes() -> None:
    recorded = record(counted, *inputs())
    assert symbols(recorded.graph) == []
    assert text(Specialise().apply(Work(Config(), recorded.module)).graph.graph) == text(recorded.graph)


def test_a_dynamic_step_is_compiled_like_a_static_one() -> None:
    recorded = (record(minimal, *operands(batch=2), dynamic=flag) for flag in (True, False))
    ours, theirs = (compiled(r.module) for r in recorded)
    assert ours.state == theirs.state
    for one, other in zip(ours.variants, theirs.variants, strict=True):
        assert text(one.graph).splitlines()[1:] == text(other.graph).splitlines()[1:]
