"""What flows through the compiler, and what every pass is.

A pass is a frozen dataclass with a `name`; its options are its fields; it takes a `Work` and returns a new one. The
base class times it and logs it (logger `sfi_compile.passes`, so `TORCH_LOGS="+sfi_compile.passes"` shows it); with
`options={"dump": folder}`, `pipeline.run` writes the graphs that it leaves behind.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

import sfi_compile.ops  # noqa: F401  (registers the sfi:: operators that passes emit and recognise)
from sfi_compile.compat.dynamo import example, fake_mode_of, size_hint
from sfi_compile.config import Config, OptionError
from sfi_compile.cost_model import CostModel
from sfi_compile.site import Form, MatchResult, Rejection

log = logging.getLogger("sfi_compile.passes")


MOST_QUERIES = 8
"""New tokens of a decode step; more are a prompt, or a part of one."""


class VerificationError(RuntimeError):
    """The compiler produced a graph that breaks its own rules: a defect, not a user's mistake."""


@dataclasses.dataclass(frozen=True)
class Refusal(Exception):
    """Why attention stays dense; carries a rejection's parts to the place that records it."""

    code: str
    explanation: str
    hint: str

    def at(self, where: str) -> Rejection:
        """The same, of the module at this path."""
        return Rejection(self.code, where, self.explanation, self.hint)


class ContextSizedError(VerificationError):
    """The fast graph would work on the whole context, in a way that matching does not foresee."""


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of state that the graphs take as an extra input."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> torch.Tensor:
        """A zeroed tensor of this kind."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Work:
    """Everything known about one graph at one stage of the pipeline."""

    config: Config
    graph: fx.GraphModule
    """The graph; after `insert_guards` the guarded graph."""
    forms: tuple[Form | Rejection, ...] = ()
    """Every attention of the graph in its one form, or why it has none, in program order."""
    queries: tuple[Any, ...] = ()
    """Queries of every attention, whether it has a form or not; symbolic where the graph is."""
    match: MatchResult | None = None
    cost: CostModel | None = None
    """The cost model of the matched sites; None without sites."""
    min_context: int | None = None
    """Valid tokens from which a row keeps a memory; None: a memory never pays in this graph."""
    state: tuple[StateTensor, ...] = ()
    """Extra inputs, in the order in which the graphs take them."""
    slow: fx.GraphModule | None = None
    fast: fx.GraphModule | None = None

    @property
    def matched(self) -> MatchResult:
        """The match; an error before the matcher has run."""
        if self.match is None:
            raise VerificationError("the graph has not been matched yet")
        return self.match

    @property
    def is_prompt(self) -> bool:
        """Whether all attention of the graph is that of a prompt or a chunk of one, not of a decode step.

        Asks no symbolic size for its value, which would pin the graph to one prompt length. Dynamo never makes a size
        of one symbolic, so a symbolic query length is a prompt's, or that of the steps in `symbolic_step`.
        """
        return bool(self.queries) and all(isinstance(n, torch.SymInt) or n > MOST_QUERIES for n in self.queries)

    @property
    def symbolic_step(self) -> tuple[Rejection, ...]:
        """Why all stays dense in a graph that `is_prompt`, but is now called for a step of a few tokens.

        It serves any number of them, so nothing in it has the shapes that a memory needs.
        """
        few = [size_hint(n) for n in self.queries if isinstance(n, torch.SymInt) and size_hint(n) <= MOST_QUERIES]
        if not few or not (self.matched.sites or self.matched.rejections):
            return ()
        explanation = f"a step of {few[0]} new tokens, whose number is symbolic, as Dynamo makes it after another one"
        hint = "feed one number of tokens, or compile with dynamic=False, or call torch._dynamo.mark_static(ids, 1)"
        # Whatever else stands against its sites may be of symbolic shapes alone.
        return (Rejection("symbolic-tokens", "graph", explanation, hint),)

    @property
    def pays(self) -> bool:
        """Whether there is anything to rewrite."""
        return bool(self.matched.sites) and self.min_context is not None

    @property
    def variants(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The slow and the fast graph; an error before they exist."""
        if self.slow is None or self.fast is None:
            raise VerificationError("the graph has not been unswitched yet")
        return self.slow, self.fast

    @property
    def added(self) -> list[Any]:
        """Fake values of the inputs that `insert_guards` has added, in the order of `state`."""
        inputs = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        return [example(n) for n in inputs[len(inputs) - len(self.state) :]]


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """One step of the compiler."""

    name: ClassVar[str]

    @abc.abstractmethod
    def apply(self, work: Work) -> Work:
        """The work after this pass. Must not change the graphs of `work` that other passes may still read."""

    def __call__(self, work: Work) -> Work:
        """Apply, time, log."""
        start = time.perf_counter()
        result = self.apply(work)
        log.debug("%s took %.1f ms", self.name, 1e3 * (time.perf_counter() - start))
        return result


def transfer(match: MatchResult, old: fx.Graph, new: fx.Graph) -> MatchResult:
    """The same match on a node-by-node copy of its graph."""
    return substituted(match, dict(zip(old.nodes, new.nodes, strict=True)).__getitem__)


def substituted(match: MatchResult, node_of: Callable[[fx.Node], fx.Node]) -> MatchResult:
    """The same match with every node replaced."""

    def move(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return node_of(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{f.name: move(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return tuple(move(v) for v in value) if isinstance(value, tuple) else value

    moved: MatchResult = move(match)
    return moved


def graphs_of(work: Work) -> dict[str, fx.GraphModule]:
    """The graphs that exist at this stage, by name."""
    if work.slow is not None and work.fast is not None:
        return {"slow": work.slow, "fast": work.fast}
    return {"graph": work.graph}


def dump(work: Work, folder: Path, stage: int, name: str) -> None:
    """Write the readable form of every graph of this stage: `NN_name.graph.py`, or `.slow.py` and `.fast.py`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for label, module in graphs_of(work).items():
            text = module.print_readable(print_output=False)
            (folder / f"{stage:02d}_{name}.{label}.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"sfi: option 'dump' is {str(folder)!r}, which cannot be written: {error.strerror}") from None


class Builder:
    """Appends nodes to a graph and computes their fake values, so that later passes can read shapes."""

    def __init__(self, graph: fx.Graph) -> None:
        mode = fake_mode_of(graph)
        if mode is None:
            raise VerificationError("a graph without fake values cannot be rewritten")
        self.graph, self.mode = graph, mode

    def value(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fake result of a call on nodes."""
        with self.mode, torch.no_grad():
            fake_args = fx.map_arg(args, example)
            return target(*fake_args, **fx.map_arg(kwargs, example))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert `target(*args, **kwargs)` at the graph's insertion point."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["example_value"] = self.value(target, args, kwargs)
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert `args[0].name(*args[1:], **kwargs)` at the graph's insertion point."""
        node = self.graph.call_method(name, args, kwargs)
        node.meta["example_value"] = self.value(getattr(torch.Tensor, name), args, kwargs)
        return node
