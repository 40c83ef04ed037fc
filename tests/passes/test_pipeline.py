"""The pipeline as a whole: order, cache key, dumps, logs, and what is carried over to the compiled graphs."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

from sfi_compile.compat.dynamo import copy_graph_module
from sfi_compile.config import Config
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Pass, VerificationError, Work, graphs_of
from tests.passes.toys import compiled, minimal, operands, record, tensor, unchanged

NAMES = ["specialise", "canonicalise", "match", "insert_guards", "commute_gather", "unswitch", "verify", "lower"]


@dataclasses.dataclass(frozen=True)
class Optional(Pass):
    """A pass with an option."""

    name: ClassVar[str] = "optional"
    tiles: int = 1

    def apply(self, work: Work) -> Work:
        return work


def test_the_order_of_the_passes() -> None:
    passes = (*pipeline.ANALYSIS, *pipeline.REWRITE)
    assert [p.name for p in passes] == NAMES
    for one in passes:
        assert dataclasses.is_dataclass(one)
        assert hash(one) == hash(dataclasses.replace(one)), "frozen: a pass is its options"


class TestCacheKey:
    """Equal for equal passes, and different as soon as a pass, its options or the order differ."""

    @staticmethod
    def key(monkeypatch: pytest.MonkeyPatch, *more: Pass, reverse: bool = False) -> str:
        passes = (*pipeline.REWRITE, *more)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "REWRITE", passes[::-1] if reverse else passes)
            return pipeline.cache_key()

    def test_it_is_stable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.key(monkeypatch) == self.key(monkeypatch) == pipeline.cache_key()
        assert self.key(monkeypatch, Optional()) == self.key(monkeypatch, Optional(1))

    def test_it_knows_passes_options_and_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = {
            self.key(monkeypatch),
            self.key(monkeypatch, reverse=True),
            self.key(monkeypatch, Optional(1)),
            self.key(monkeypatch, Optional(2)),
        }
        assert len(keys) == 4

    def test_it_knows_the_kernels(self) -> None:
        for part in ("def dense_row(", "class Commuter", "{{def_kernel(", "def pack_rows("):
            assert part in pipeline._rooms()


def test_one_dump_a_stage(tmp_path: Path) -> None:
    compiled(record(minimal, *operands()).module, dump=str(tmp_path / "graphs"))
    stages = [f"{i:02d}_{name}" for i, name in enumerate(NAMES)]
    expected = [f"{s}.graph.py" for s in stages[:5]]
    expected += [f"{s}.{v}.py" for s in stages[5:] for v in ("fast", "slow")]
    files = {p.name: p.read_text() for p in sorted((tmp_path / "graphs").iterdir())}
    assert list(files) == expected
    assert "scaled_dot_product_attention" in files["01_canonicalise.graph.py"]
    assert "sfi.attention" in files["02_match.graph.py"], "the canonical node, beside the graph's own"
    guarded = files["03_insert_guards.graph.py"]
    assert "torch.ops.higher_order.cond" in guarded
    assert all(f"sfi.{name}" in guarded for name in ("dense_attention", "select", "pack", "append", "memory_attention"))
    assert guarded.count("sfi.gather") == 1
    assert "sfi.gather" not in files["04_commute_gather.graph.py"]
    assert not any("higher_order.cond" in text for name, text in files.items() if name > "05")
    assert "sfi.memory_attention" not in files["07_lower.fast.py"]


def test_no_dump_without_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled(record(minimal, *operands()).module)
    assert list(tmp_path.iterdir()) == []


def test_torch_logs_shows_the_passes() -> None:
    """`TORCH_LOGS="+sfi_compile.passes"` sets the level of this logger, as `set_logs(modules=…)` does."""
    logger = logging.getLogger("sfi_compile.passes")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda message: lines.append(message.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    module = record(minimal, *operands()).module
    try:
        torch._logging.set_logs(modules={"sfi_compile.passes": logging.DEBUG})
        compiled(module)
        shown = list(lines)
        lines.clear()
        torch._logging.set_logs()
        compiled(module)
        assert lines == []
    finally:
        torch._logging.set_logs()
        logger.removeHandler(handler)
    assert [line.split(" took ")[0] for line in shown][-len(NAMES) :] == NAMES
    assert all(line.endswith(" ms") for line in shown)


class Toy(nn.Module):
    """A layer with parameters and a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.register_buffer("keys", torch.zeros(1, 1, 8, 2))
        self.register_buffer("values", torch.zeros(1, 1, 8, 2))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q = self.proj(x)
        return minimal(q, x, x, self.keys, self.values, pos)  # type: ignore[arg-type]


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


class TestCarriedOver:
    """What Dynamo hangs on its graph decides which inputs are static."""

    def test_the_graph_given_is_not_changed(self) -> None:
        recorded = record(Toy(), tensor(1, 1, 1, 2), torch.tensor([2]))
        code, metas = recorded.module.code, [dict(n.meta) for n in recorded.graph.nodes]
        with unchanged(recorded.graph):
            compiled(recorded.module)
        assert recorded.module.code == code
        assert [n.meta.keys() for n in recorded.graph.nodes] == [m.keys() for m in metas]
        assert not list(recorded.module.children())

    def test_sources_of_inputs(self) -> None:
        recorded = record(Toy(), tensor(1, 1, 1, 2), torch.tensor([2]))
        work = compiled(recorded.module)
        given = placeholders(recorded.module)
        names = {n.name for n in given}
        assert any("proj" in name for name in names), "parameters are inputs"
        for module in (work.graph, *work.variants):
            inputs = placeholders(module)
            assert [n.name for n in inputs[: len(given)]] == [n.name for n in given]
            for ours, theirs in zip(inputs, given, strict=False):
                assert ours is not theirs
                assert ours._dynamo_source is theirs._dynamo_source is not None
                assert ours.meta["example_value"] is theirs.meta["example_value"]
                assert ours.meta.get("tensor_dict") == theirs.meta.get("tensor_dict")
            added = inputs[len(given) :]
            assert [n.name for n in added] == [s.name for s in work.state]
            assert all(n.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"} for n in added)
            assert all(n._dynamo_source is None for n in added)

    def test_attributes_of_the_module(self) -> None:
        recorded = record(minimal, *operands())
        recorded.module._param_name_to_source = {"w": "source"}  # type: ignore[assignment]
        work = compiled(recorded.module)
        for module in (work.graph, *work.variants):
            assert module._param_name_to_source is recorded.module._param_name_to_source

    def test_a_copy_shares_no_nodes(self) -> None:
        recorded = record(minimal, *operands())
        copied = copy_graph_module(recorded.module)
        assert not {*copied.graph.nodes} & {*recorded.graph.nodes}
        with unchanged(recorded.graph):
            copied.graph.erase_node(next(n for n in copied.graph.nodes if "index_copy_" in n.name))


class TestWork:
    """A stage that has not run is an error, not a surprise."""

    def test_missing_stages(self) -> None:
        work = Work(Config(), record(minimal, *operands()).module)
        with pytest.raises(VerificationError, match="not been matched"):
            _ = work.matched
        with pytest.raises(VerificationError, match="not been unswitched"):
            _ = work.variants
        assert list(graphs_of(work)) == ["graph"]

    def test_nothing_to_rewrite(self) -> None:
        work = pipeline.run(pipeline.ANALYSIS, Work(Config(), record(lambda x: x + 1, tensor(2)).module))
        assert not work.pays
