"""What Dynamo calls at every decode step: guard → slow or fast graph → counters.

The guard reads the position, the tokens fed, and one key row of the cache; it never trusts an address. Everything it
needs from the device comes over in one read. State tensors are allocated once and never move.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sfi_compile import diagnostics
from sfi_compile.config import Config
from sfi_compile.ops import RowStatus
from sfi_compile.triggers import Row, Trigger, refreshed, trigger

log = logging.getLogger("sfi_compile")

_WARNINGS = {
    RowStatus.NOT_FINITE: "attention of row {row} is not finite at position {position}; it stays dense",
    RowStatus.AHEAD: "row {row} attends to positions after the one written, {position}: its mask lets them through, or "
    "blocks all of them with a number that is not -inf; it stays dense",
}


@dataclasses.dataclass(frozen=True)
class GuardInputs:
    """Where the guard finds its inputs among the graph's."""

    positions: Callable[..., tuple[Tensor | int, ...]]
    """Computes where the sites write (all positions, or the first) from the inputs at `position_arguments`, without
    side effects. Of sites that compute it in the same way, each from its own counter, one stands for all."""
    position_arguments: tuple[int, ...]
    fixed_positions: tuple[int, ...]
    """First positions that are numbers in the graph."""
    counters: tuple[tuple[int, ...], ...]
    """Those counters: inputs that must be equal within each group."""
    tokens: int | None
    lengths: tuple[int, ...]
    """Positions of the shortest cache that is written at each of them, the fixed ones last."""
    watched: tuple[int, ...]
    """Inputs that nobody else may change while a memory lives: all cache roots, and what keys and values are computed
    from beside them."""
    identical: tuple[int, ...]
    """Those of them that must be the same objects: all that are no caches; the root, too, where it is not telling."""
    telling: bool
    """Whether the fingerprint depends on the tokens before it."""
    root: int
    """Input whose row is the fingerprint."""
    axis: int
    """Sequence axis of the root."""
    batch: int
    batch_axis: int | None
    """Batch axis of the root (None: one row, or unknown: then all rows continue or none)."""
    queries: int
    """Tokens that a step feeds a row."""


class DecodeRunner:
    """One compiled decode graph: two callables and the state that they share."""

    def __init__(
        self,
        slow: Callable[..., Any],
        fast: Callable[..., Any],
        guard: GuardInputs,
        state: dict[str, Tensor],
        config: Config,
        min_context: int,
        sites: int,
    ) -> None:
        self.slow, self.fast, self.guard, self.config, self.sites = slow, fast, guard, config, sites
        self.min_context = max(min_context, 1)
        self.state = state
        self.arguments = tuple(state.values())
        self.rows = [Row() for _ in range(guard.batch)]
        self.boundary = frozenset(config.boundary_token_ids) if guard.tokens is not None else frozenset()
        self.next_position: int | None = None
        self.fingerprint: Tensor | None = None
        self.marks: list[Any] = []
        self.known: list[weakref.ref[Tensor]] = []
        self.lock = threading.Lock()
        self.warned: set[RowStatus] = set()
        diagnostics.runners.add(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(t.numel() * t.element_size() for t in self.arguments)

    def drop_memory(self) -> None:
        """Forget every row: the next step is slow."""
        self.rows = [Row() for _ in range(self.guard.batch)]
        self.next_position = None
        self.warned.clear()

    def __call__(self, *args: Any) -> Any:
        """Run one step with the graph's own inputs.

        Raises:
            IndexError: the position lies outside the cache.
        """
        with self.lock:  # threads share the state, whichever cache they decode on
            position, why, status = self._decide(args)
            slow = any(why)
            if slow:
                self._announce(why, status)
            # Until the step is done, no row may trust what is half done: an error leaves all rows slow.
            self.next_position = None
            out = (self.slow if slow else self.fast)(*args, *self.arguments)
            if slow:
                self._settle(position, why)
            self._count(position, why)
            if status is not RowStatus.SPLIT:
                self._remember(args, position)
            return out

    def _decide(self, args: Sequence[Any]) -> tuple[int, list[Trigger | None], RowStatus]:
        """The step's last position, why each row must be slow (None: it may be fast), and what slow rows start from."""
        g = self.guard
        written = [*g.positions(*(args[i] for i in g.position_arguments)), *g.fixed_positions]
        flags: list[Tensor] = []
        for position in written:
            if isinstance(position, Tensor):
                flat = position.reshape(-1)
                if flat.shape[0] > 1:
                    flags += [flat[:1], flat[-1:], (flat.diff() == 1).all().reshape(1)]
                else:
                    flags.append(flat)
        for group in g.counters:
            counters = torch.stack([args[i] for i in group])
            flags.append((counters == counters[0]).all().reshape(1))
        if self.boundary and g.tokens is not None:
            flags.append(args[g.tokens].reshape(-1))
        trusted = self.next_position is not None and self._untouched(args)
        if trusted:
            flags.append(self._same_rows(args[g.root]))
        values = iter(torch.cat(flags).tolist() if flags else ())  # the one read of a step
        spans = [self._span(p, length, values) for p, length in zip(written, g.lengths, strict=True)]
        first, last = spans[0]
        agree = [next(values) for _ in g.counters]
        ends = [[next(values) in self.boundary for _ in range(g.queries)] for _ in self.rows if self.boundary]
        # A memory has one position, counted from the start. A slow step needs none, so such a step is slow, and no row
        # gets a memory.
        split = len(set(spans)) > 1 or not all(agree) or first < 0 or last - first != g.queries - 1
        trusted = trusted and first == self.next_position and not split
        why: list[Trigger | None] = []
        for b, row in enumerate(self.rows):
            continues = trusted and bool(next(values))
            if not continues:
                row.context = 0  # another sequence, of a length that is not known
            why.append(trigger(row, self.config, last, continues, bool(ends) and any(ends[b])))
        return last, why, RowStatus.SPLIT if split else RowStatus.READY

    def _span(self, position: Tensor | int, length: int, values: Iterator[int]) -> tuple[int, int]:
        """First and last of the positions that a step writes; a last before the first says that they do not follow."""
        several = isinstance(position, Tensor) and position.numel() > 1
        first = next(values) if isinstance(position, Tensor) else int(position)
        last = next(values) if several else first + self.guard.queries - 1
        if several and not next(values):
            return first, first - 1
        if last >= length:
            raise IndexError(
                f"sfi: position {last} lies outside the cache, which holds {length} positions; "
                "give the cache a larger max_cache_len"
            )
        return (first + length, last + length) if last < 0 else (first, last)  # counted from the end

    def _same_rows(self, root: Tensor) -> Tensor:
        """Bool [B]: the root still holds, at the last position, the key row that our last step left there."""
        g = self.guard
        assert self.next_position is not None
        assert self.fingerprint is not None
        same = root.select(g.axis, self.next_position - 1) == self.fingerprint
        if g.batch_axis is None:
            return same.all().expand(g.batch)
        return same.movedim(g.batch_axis - (g.batch_axis > g.axis), 0).flatten(1).all(1)

    def _untouched(self, args: Sequence[Any]) -> bool:
        """The same memory, into which nobody else wrote since our last step, as far as torch tracks it.

        An equal address proves nothing, but another one is another cache. Where the fingerprint cannot tell two texts
        apart (the keys of a first layer depend on token and position alone), the root must be the same object, too, and
        have a version counter, which `inference_mode` does not keep.
        """
        if not self.guard.telling and args[self.guard.root].is_inference():
            return False
        if any(known() is not args[i] for known, i in zip(self.known, self.guard.identical, strict=True)):
            return False  # another tensor, perhaps where the last one was
        return self.marks == self._marks(args)

    def _marks(self, args: Sequence[Any]) -> list[Any]:
        watched = [args[i] for i in self.guard.watched]
        return [(t.data_ptr(), None if t.is_inference() else t._version) for t in watched]

    def _announce(self, why: list[Trigger | None], status: RowStatus) -> None:
        statuses = []
        for row in self.rows:
            # A row that is known to be short needs no selection.
            short = row.context > 0 and row.context + self.guard.queries < self.min_context
            statuses.append(max(status, RowStatus.SHORT) if short else status)
        slow, found = torch.tensor([[w is not None for w in why], statuses])
        self.state["sfi_slow_rows"].copy_(slow)
        self.state["sfi_status"].copy_(found)
        self.state["sfi_context"].zero_()

    def _settle(self, position: int, why: list[Trigger | None]) -> None:
        status, context = torch.stack([self.state["sfi_status"], self.state["sfi_context"]]).tolist()
        held = (self.state["sfi_held_0"] >= 0).sum(-1).float().mean(-1).tolist()
        for b, (row, reason) in enumerate(zip(self.rows, why, strict=True)):
            if reason is None:
                continue
            row.context = context[b]
            if status[b] == RowStatus.READY and row.context >= self.min_context:
                refreshed(row, self.config, position, reason)
                row.support = held[b]
            else:
                row.valid = False
                self._warn_once(RowStatus(status[b]), b, position)
        self.state["sfi_refreshed_at"].copy_(torch.tensor([row.refreshed_at for row in self.rows]))

    def _warn_once(self, status: RowStatus, row: int, position: int) -> None:
        if status in _WARNINGS and status not in self.warned:
            self.warned.add(status)
            log.warning("sfi: %s", _WARNINGS[status].format(row=row, position=position))

    def _count(self, position: int, why: list[Trigger | None]) -> None:
        c = diagnostics.counters
        if any(why):
            c.slow_steps += 1
            c.short_steps += not any(row.valid for row, w in zip(self.rows, why, strict=True) if w)
        else:
            c.fast_steps += 1
        for row, reason in zip(self.rows, why, strict=True):
            if reason is not None:
                c.triggers[reason] += 1
                c.refreshes += row.valid
            else:
                row.context += self.guard.queries
                support = min(row.support + position - row.refreshed_at, row.context)
                c.fast_rows += 1
                c.support_sum += support
                c.retention_sum += support / row.context

    def _remember(self, args: Sequence[Any], position: int) -> None:
        """The fingerprint, and the marks of all caches, that the next step must find again."""
        root: Tensor = args[self.guard.root]
        row = root.select(self.guard.axis, position)
        if self.fingerprint is None:
            if root.is_inference() and not self.guard.telling:
                log.warning("sfi: one layer under torch.inference_mode(): every step is slow; use torch.no_grad()")
            self.fingerprint = torch.empty_like(row, memory_format=torch.contiguous_format)
        self.fingerprint.copy_(row)
        self.next_position = position + 1
        self.marks = self._marks(args)
        self.known = [weakref.ref(args[i]) for i in self.guard.identical]
