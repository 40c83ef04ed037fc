"""What happened: counters of every compiled decode graph, summed by `stats()`, and the Report of `explain`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sfi_compile.cost_model import CostModel
from sfi_compile.site import Rejection, Site
from sfi_compile.triggers import Trigger

if TYPE_CHECKING:
    from sfi_compile.runtime import DecodeRunner


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the start of the process or the last `reset()`, over all compiled decode graphs."""

    slow_steps: int
    """Steps in which at least one row read its whole context."""
    fast_steps: int
    """Steps in which every row read its memory."""
    short_steps: int
    """Slow steps in which every slow row was still below the context from which a memory is kept."""
    triggers: dict[str, int]
    """Slow rows by reason: invalid, interval, boundary."""
    refreshes: int
    """Memories rebuilt: slow rows that got a memory."""
    support: float | None
    """Mean tokens per KV head that fast rows attended to; None before the first fast step."""
    retention: float | None
    """The same as a share of the row's context (0..1)."""
    sites: int
    """Attention sites rewritten, over all graphs that are alive."""
    rejections: tuple[Rejection, ...]
    """Sites left dense in decode graphs, and decode graphs left dense, over all graphs that are alive."""
    graphs: int
    """Decode graphs compiled into a slow and a fast one."""
    memory_bytes: int
    """Bytes of packed memory and other state."""

    def as_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"triggers": dict(self.triggers), "rejections": [r.as_dict() for r in self.rejections]}


@dataclasses.dataclass
class Counters:
    """Running totals; the runtime adds to them."""

    slow_steps: int = 0
    fast_steps: int = 0
    short_steps: int = 0
    refreshes: int = 0
    triggers: dict[Trigger, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Trigger, 0))
    fast_rows: int = 0
    support_sum: float = 0.0
    retention_sum: float = 0.0
    graphs: int = 0


class DenseGraph:
    """A decode graph that stays dense as a whole."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Run it, as plain Inductor compiled it."""
        return self.call(*args)


counters = Counters()
runners: weakref.WeakSet[DecodeRunner] = weakref.WeakSet()
rejected: weakref.WeakKeyDictionary[DenseGraph | DecodeRunner, tuple[Rejection, ...]] = weakref.WeakKeyDictionary()
"""What stayed dense in each graph that is alive, in the order of their compilation."""


def rejections() -> tuple[Rejection, ...]:
    """Of all graphs that are alive, each once."""
    return tuple(dict.fromkeys(rejection for found in rejected.values() for rejection in found))


def stats() -> Stats:
    """What slow and fast steps have done so far in this process; on a GPU, waits for the last step."""
    for runner in runners:
        runner.settle()
    c = counters
    return Stats(
        slow_steps=c.slow_steps,
        fast_steps=c.fast_steps,
        short_steps=c.short_steps,
        triggers={t.value: n for t, n in c.triggers.items()},
        refreshes=c.refreshes,
        support=c.support_sum / c.fast_rows if c.fast_rows else None,
        retention=c.retention_sum / c.fast_rows if c.fast_rows else None,
        sites=sum(r.sites for r in runners),
        rejections=rejections(),
        graphs=c.graphs,
        memory_bytes=sum(r.memory_bytes for r in runners),
    )


def reset() -> None:
    """Drop every memory and zero the step counters. Compiled graphs and what is known of them stay."""
    for runner in runners:
        runner.drop_memory()
    for field in dataclasses.fields(Counters):
        if field.name != "graphs":
            setattr(counters, field.name, getattr(Counters(), field.name))


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler would do with one decode step."""

    sites: tuple[dict[str, Any], ...]
    """module, form, query_heads, kv_heads, root of each site that is rewritten."""
    rejections: tuple[Rejection, ...]
    cost: CostModel | None
    """None without sites."""
    tokens: str | None
    """Graph input whose tokens trigger at boundaries; None: the interval alone decides."""

    @property
    def break_even_context(self) -> int | None:
        """Valid tokens from which slow and fast steps beat dense attention; None: never, or no sites."""
        return None if self.cost is None else self.cost.break_even

    def as_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        return {
            "sites": [dict(s) for s in self.sites],
            "rejections": [r.as_dict() for r in self.rejections],
            "break_even_context": self.break_even_context,
        }

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} attention sites rewritten, {len(self.rejections)} rejections"]
        for s in self.sites:
            lines.append(
                f"  {s['module']}: {s['form']}, {s['query_heads']} query heads over {s['kv_heads']} KV heads, "
                f"cache {s['root']}"
            )
        lines += [f"  dense: {r}" for r in self.rejections]
        if self.cost is not None:
            trigger = f"boundary tokens from {self.tokens}" if self.tokens else "no token input: interval only"
            lines += [trigger, self.cost.describe()]
        return "\n".join(lines)


def site_rows(sites: tuple[Site, ...]) -> tuple[dict[str, Any], ...]:
    """Sites as a Report keeps them: without graph nodes, so that no graph is kept alive."""
    return tuple(s.as_dict() for s in sites)
