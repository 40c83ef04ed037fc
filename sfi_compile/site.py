"""What the passes say to each other: Site, Guard, Rejection. Frozen records; no logic, nothing is changed here."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A site (or a whole graph) left dense, and why."""

    code: str
    """Constant, e.g. "no-cache-write"."""
    where: str
    """Module path of the site, or "graph"."""
    explanation: str
    """What was found, with the value."""
    hint: str
    """What the user can change."""

    def as_dict(self) -> dict[str, str]:
        """Plain dict with the four fields."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.code}: {self.explanation} ({self.hint})"


class RejectedSitesError(RuntimeError):
    """Raised with `strict=True` when a decode graph has sites that must stay dense."""

    def __init__(self, rejections: tuple[Rejection, ...]) -> None:
        lines = "\n  ".join(str(r) for r in rejections)
        super().__init__(f"sfi: strict=True and {len(rejections)} rejection(s):\n  {lines}")
        self.rejections = rejections


@dataclasses.dataclass(frozen=True)
class Form:
    """Attention brought to its one form, beside the graph's own way of computing it, which still stands."""

    name: str
    """How the graph writes it, e.g. "sdpa"."""
    node: fx.Node
    """`sfi::attention`."""
    result: fx.Node
    """Its value in the shape of `original`."""
    original: fx.Node
    """What the graph computes."""
    repeats_heads: bool
    """The graph materialises keys and values repeated to the query heads."""


@dataclasses.dataclass(frozen=True)
class CacheWrite:
    """The write of this step into a cache root."""

    node: fx.Node
    """The mutation (`index_copy_`, `setitem`, `copy_` into a slice, `scatter_`)."""
    root: fx.Node
    """Placeholder that holds the cache."""
    axis: int
    """Sequence axis of the root."""
    batch_axis: int | None
    """Batch axis of the root; None if it has one row, or where the graph does not tell."""
    index: fx.Node | int
    """First position written: an int tensor [count] of all positions, or [], or a number."""
    count: int
    """Positions written."""
    value: fx.Node
    """What is written; it broadcasts to the root with the sequence axis of length `count`."""
    lacks_axis: bool = False
    """The value is written as one slot, without the sequence axis."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention computation of a decode graph that can be rewritten. Shapes are ints: the graph is specialised."""

    module: str
    """Path of the module that computes it, e.g. "model.layers.0.self_attn"."""
    form: Form
    query: fx.Node
    """[batch, query_heads, query_len, key_dim]."""
    key: fx.Node
    """[batch, kv_heads, context, key_dim], before any head repetition."""
    value: fx.Node
    """[batch, kv_heads, context, value_dim], before any head repetition."""
    mask: fx.Node
    """Bool (True: may attend) or float (added to the logits), broadcastable over [batch, query_heads, query_len, N]."""
    scale: float
    """Factor of the logits."""
    softcap: float
    """Logits x become `softcap * tanh(x / softcap)` before the mask; 0: they do not."""
    sinks: fx.Node | None
    """[1 or batch, 1 or query_heads, 1 or query_len, columns]: logits that take weight and give nothing."""
    fill: fx.Node | None
    """What the model's own softmax sees where the mask blocks, broadcastable like the mask. None: nothing."""
    writes: tuple[CacheWrite, ...]
    """Every write into what keys and values come from; the first is of the keys."""
    batch: int
    query_heads: int
    kv_heads: int
    query_len: int
    key_dim: int
    value_dim: int
    context: int
    """Positions allocated in the cache root (N)."""
    dtype: torch.dtype
    """dtype of the keys and values that attention reads."""
    device: torch.device
    constants: tuple[fx.Node, ...]
    """Graph inputs from which, beside the cache, keys and values are computed; a memory outlives no change of them."""
    context_sources: tuple[fx.Node, ...]
    """Where context-sized axes enter: cache roots, mask inputs, constructors as long as the context."""
    kept: tuple[fx.Node, ...] = ()
    """What may stay as long as the context in a fast step: running counts over a mask [batch, context]."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def as_dict(self) -> dict[str, object]:
        """What `explain` reports of a site."""
        return {
            "module": self.module,
            "form": self.form.name,
            "query_heads": self.query_heads,
            "kv_heads": self.kv_heads,
            "root": self.writes[0].root.name,
        }


@dataclasses.dataclass(frozen=True)
class Guard:
    """What the step predicate reads: one predicate for all sites of a decode graph."""

    positions: tuple[fx.Node | int, ...]
    """Where the sites write, as `CacheWrite.index`, each node or number once, the first site's first.

    Every layer may keep a counter of its own; the runtime checks that they agree.
    """
    tokens: fx.Node | None
    """Placeholder [batch, query_len] of the token ids fed, or None (then only the interval triggers)."""
    write: CacheWrite
    """The key write whose root's row at `p - 1` is the fingerprint."""
    telling: bool
    """The fingerprint depends on the tokens before: its key is computed from an earlier site's output."""


@dataclasses.dataclass(frozen=True)
class MatchResult:
    """Everything the matcher found in one graph; the graph itself is unchanged."""

    sites: tuple[Site, ...]
    rejections: tuple[Rejection, ...]
    guard: Guard | None
    """None if and only if there are no sites."""
