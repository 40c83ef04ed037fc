"""Small decode steps, the Dynamo graphs that they become, and a short text of a graph to compare with.

Nothing here runs Inductor: Dynamo traces a plain function, a recording backend keeps the graph, and the passes work on
that. Imports torch and the compiler's front end.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from sfi_compile.backend import analyse
from sfi_compile.config import Config
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from sfi_compile.site import MatchResult

OPTIONS: dict[str, Any] = {"sink": 1, "recent": 2, "k_head": 2, "refresh_interval": 2, "min_context": 0}
"""A memory of seven slots, kept at any context."""
SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One Dynamo graph and the tensors that it was traced with, before the step changed them."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def node(self, name: str) -> fx.Node:
        return next(n for n in self.graph.nodes if n.name == name)

    def index(self, name: str) -> int:
        """Place of an input."""
        return [n.name for n in self.graph.nodes if n.op == "placeholder"].index(name)

    def fresh(self) -> tuple[Any, ...]:
        """The inputs again, untouched by earlier runs."""
        return copy.deepcopy(self.inputs)


def record(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Recorded:
    """The graph that Dynamo hands to a backend for `function(*args)`, without gradients."""
    found: list[Recorded] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(Recorded(module, tuple(map(_value, inputs))))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(
            *tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, args)
        )
    return found[0]


def _value(given: Any) -> Any:
    """What an input holds in this call."""
    if isinstance(given, (torch.SymInt, torch.SymFloat)):
        return given.node.hint
    return given.detach().clone() if isinstance(given, Tensor) else given


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Write both caches; the causal mask."""
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return (torch.arange(keys.shape[2]) <= pos)[None, None, None]


def minimal(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """The smallest decode step: write, mask, attend."""
    mask = written(k, v, keys, values, pos)
    return SDPA(q, keys, values, attn_mask=mask)


def operands(
    batch: int = 1, query_heads: int = 1, kv_heads: int = 1, size: int = 8, dim: int = 2, at: int = 5
) -> tuple[Tensor, ...]:
    """q, k, v, keys, values, pos for a step like `minimal`."""
    q = tensor(batch, query_heads, 1, dim)
    k, v = tensor(batch, kv_heads, 1, dim, seed=1), tensor(batch, kv_heads, 1, dim, seed=2)
    keys, values = tensor(batch, kv_heads, size, dim, seed=3), tensor(batch, kv_heads, size, dim, seed=4)
    return q, k, v, keys, values, torch.tensor([at])


def compiled(module: fx.GraphModule, until: str = "lower", **options: Any) -> Work:
    """Run the pipeline on a recorded graph up to and with the pass `until`."""
    config = Config.from_options({**OPTIONS, **options})
    work = analyse(module, pipeline.run(pipeline.SURVEY, Work(config, module)))
    assert work.pays, [str(r) for r in work.matched.rejections]
    names = [p.name for p in pipeline.REWRITE]
    passes = pipeline.REWRITE[: names.index(until) + 1]
    return pipeline.run(passes, work, first_stage=len(pipeline.ANALYSIS))


def matched(module: fx.GraphModule) -> MatchResult:
    """Sites and rejections of a recorded graph, which stays as it is."""
    with unchanged(module.graph):
        return pipeline.run(pipeline.ANALYSIS, Work(Config.from_options(OPTIONS), module)).matched


def codes(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[int, list[str]]:
    """Number of sites of a step, and why anything else stays dense."""
    found = matched(record(function, *args, dynamic=dynamic).module)
    return len(found.sites), [r.code for r in found.rejections]


def check_step(function: Callable[..., Any], *args: Any, tolerance: float = 1e-12, sites: int = 1, **more: Any) -> Work:
    """A slow step, and a fast one with a memory of everything, compute what the function computes, caches included.

    Args:
        function: a step that takes `pos` (a tensor) or `at` (a number), the positions that it writes.
        args: its arguments.
        tolerance: largest absolute difference.
        sites: how many it has.
        more: `dynamic` of `record`.
    """
    recorded = record(function, *args, **more)
    work = compiled(recorded.module, "verify", k_head=8)
    assert len(work.matched.sites) == sites
    assert not work.matched.rejections, [str(r) for r in work.matched.rejections]
    given, expected, kept = list(recorded.fresh()), list(recorded.fresh()), state(work, slow=True)
    names = [n.name for n in recorded.graph.nodes if n.op == "placeholder"]
    for kind, module in zip(("slow", "fast"), work.variants, strict=True):
        if kind == "fast" and not {"l_pos_", "l_at_"} & set(names):
            break  # a constant of the graph
        if kind == "fast":
            assert not kept[2].any(), f"no memory: status {kept[2].tolist()}"
            kept[0].fill_(False)
            for inputs in (expected, given):
                last = _next_step(names, inputs)
            kept[1].fill_(last)
        found, wanted = module(*given, *kept), recorded.module(*expected)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=lambda m, k=kind: f"{k}: {m}")
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
    return work


def _next_step(names: list[str], inputs: list[Any]) -> int:
    """Other queries, keys and values at the positions that follow; the last position before."""
    for seed, name in enumerate(n for n in ("l_q_", "l_k_", "l_v_") if n in names):
        old = inputs[names.index(name)]
        old.copy_(tensor(*old.shape, seed=50 + seed).to(old.dtype))
    if "l_at_" in names:
        inputs[names.index("l_at_")] += 1
        return int(inputs[names.index("l_at_")]) - 1
    at = inputs[names.index("l_pos_")]
    last = int(at.max())
    at.add_(max(at.numel(), 1))
    return last


def state(work: Work, slow: bool) -> list[Tensor]:
    """Zeroed state, with the flag of every row set to `slow`."""
    tensors = [s.allocate() for s in work.state]
    tensors[0].fill_(slow)
    return tensors


def branch(work: Work, name: str) -> fx.Graph:
    """A branch of the guarded graph."""
    module = getattr(work.graph, name)
    assert isinstance(module, fx.GraphModule)
    return module.graph


def text(graph: fx.Graph) -> str:
    """One line a node: `name = target(args)`; inputs on one line. Selector specs read `SPEC`.

    Nodes are named after their targets in program order (`add`, `add_2`), because what Dynamo calls them depends on its
    version; inputs and attributes keep their names.
    """
    names: dict[fx.Node, str] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        short = node.name if node.op in ("placeholder", "output") else _target(node.target).rpartition(".")[2]
        counts[short] += 1
        names[node] = short if counts[short] == 1 else f"{short}_{counts[short]}"

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, str) and "k_head=" in value:
            return "SPEC"
        if isinstance(value, (tuple, list)):
            inside = ", ".join(map(show, value))
            return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
        if isinstance(value, float):
            return f"{value:.4g}"
        return repr(value)

    lines = [f"({', '.join(n.name for n in graph.nodes if n.op == 'placeholder')})"]
    for node in graph.nodes:
        given = [show(a) for a in node.args] + [f"{k}={show(a)}" for k, a in node.kwargs.items()]
        if node.op == "output":
            lines.append(f"return {given[0]}")
        elif node.op == "call_method":
            lines.append(f"{names[node]} = {given[0]}.{node.target}({', '.join(given[1:])})")
        elif node.op == "call_function":
            lines.append(f"{names[node]} = {_target(node.target)}({', '.join(given)})")
        elif node.op == "get_attr":
            lines.append(f"{names[node]} = self.{node.target}")
    return "\n".join(lines)


def same_text(graph: fx.Graph, expected: str) -> None:
    """Compare with an indented golden text, line by line."""
    wanted = "\n".join(line.strip() for line in expected.strip().splitlines())
    assert text(graph) == wanted, f"\n{text(graph)}"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    return str(getattr(target, "__name__", target))


@contextmanager
def unchanged(graph: fx.Graph) -> Iterator[None]:
    """Whatever happens inside must leave the graph as it was."""
    before = text(graph)
    yield
    assert text(graph) == before
