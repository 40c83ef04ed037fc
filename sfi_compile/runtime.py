"""What Dynamo calls at every decode step: guard → slow or fast graph → counters.

The guard reads the position, the tokens fed, and one key row of the cache; it never trusts an address. Everything it
needs from the device comes over in one read. State tensors are allocated once and never move.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sfi_compile import diagnostics
from sfi_compile.announcement import Announcement
from sfi_compile.config import Config
from sfi_compile.guard import Found, GuardInputs, Reader
from sfi_compile.ops import RowStatus
from sfi_compile.triggers import Row, Trigger, refreshed, trigger

log = logging.getLogger("sfi_compile")

_WARNINGS = {
    RowStatus.NOT_FINITE: "attention of row {row} is not finite at position {position}; it stays dense",
    RowStatus.AHEAD: "row {row} attends to positions after the one written, {position}: its mask lets them through, or "
    "blocks all of them with a number that is not -inf; it stays dense",
}


TOLD = ("sfi_slow_rows", "sfi_status", "sfi_refreshed_at", "sfi_started_at", "sfi_since")
"""What the host tells the device before a slow step, of the state that sites share."""


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
        held = [state[f"sfi_held_{i}"] for i in range(sites)]
        # Memories of one size are filled alike: the first stands for all.
        counted = tuple(held if len({t.shape[2] for t in held}) > 1 else held[:1])
        self.found = Found(self._shared("sfi_status"), self._shared("sfi_context"), counted)
        self.reader = Reader(guard, bool(self.boundary), self.found)
        told = {name: self._shared(name) for name in TOLD if name in state}
        self.announcement = Announcement(guard.batch, told, self.found.context)
        self.unsettled: tuple[int, list[Trigger | None]] | None = None
        """Position and reasons of a slow step of which nobody has read yet what it left."""
        self.next_position: int | None = None
        self.fingerprint: Tensor | None = None
        self.marks: tuple[list[int], list[int | None]] | None = None
        self.known: list[weakref.ref[Tensor]] = []
        self.lock = threading.Lock()
        self.warned: set[RowStatus] = set()
        diagnostics.runners.add(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(t.numel() * t.element_size() for t in self.arguments)

    def _shared(self, name: str) -> tuple[Tensor, ...]:
        """State that sites share, once for each device."""
        return tuple(t for full, t in self.state.items() if full.rstrip("0123456789").rstrip("_") == name)

    def drop_memory(self) -> None:
        """Forget every row: the next step is slow."""
        self.rows = [Row() for _ in range(self.guard.batch)]
        self.next_position = self.unsettled = None
        self.warned.clear()

    def supports(self) -> tuple[list[int | None], list[Tensor]]:
        """Where each row's memory was made (None: it has none), and the positions that every site's memories hold,
        int64 [B, Hkv, S], -1 for empty slots: the state itself, which the next step changes. Waits for the device."""
        with self.lock:
            self._settle_now()
            made = [row.refreshed_at if row.valid else None for row in self.rows]
            return made, [self.state[f"sfi_held_{i}"] for i in range(self.sites)]

    def settle(self) -> None:
        """Read what the last step left on the device now, instead of with the next step; waits for the device."""
        with self.lock:
            self._settle_now()

    def _settle_now(self) -> None:
        if self.unsettled is not None:
            self._settle([values.tolist() for values in self.found.values()])

    def __call__(self, *args: Any) -> Any:
        """Run one step with the graph's own inputs.

        Raises:
            IndexError: the position lies outside the cache.
        """
        with self.lock:  # threads share the state, whichever cache they decode on
            position, why, status = self._decide(args)
            slow = any(why)
            if slow:
                self._announce(position, why, status)
            # Until the step is done, no row may trust what is half done: an error leaves all rows slow.
            self.next_position = None
            out = (self.slow if slow else self.fast)(*args, *self.arguments)
            self._count(position, why)
            if slow:
                self.unsettled = position, why
                for row, reason in zip(self.rows, why, strict=True):
                    row.slow_at = row.slow_at if reason is None else position
            if status is not RowStatus.SPLIT:
                self._remember(args, position)
            return out

    def _decide(self, args: Sequence[Any]) -> tuple[int, list[Trigger | None], RowStatus]:
        """The step's last position, why each row must be slow (None: it may be fast), and what slow rows start from."""
        g = self.guard
        remembered = self.next_position is not None
        answer = self.reader.ask(args, self.fingerprint if remembered else None, self.unsettled is not None)
        trusted = remembered and self._untouched(args)  # while a GPU computes the answer
        read = answer()
        if self.unsettled is not None:
            self._settle(read.found)
        first, last = read.spans[0]
        # A memory has one position, counted from the start. A slow step needs none, so such a step is slow, and no row
        # gets a memory.
        split = len(set(read.spans)) > 1 or not read.agree or first < 0 or last - first != g.queries - 1
        trusted = trusted and first == self.next_position and not split
        why: list[Trigger | None] = []
        for b, row in enumerate(self.rows):
            continues = trusted and read.same[b]
            if not continues:
                row.context, row.started_at, row.slow_at = 0, first, None  # another, of a length that is not known
            ends = bool(read.tokens) and any(token in self.boundary for token in read.tokens[b])
            why.append(trigger(row, self.config, last, continues, ends))
        return last, why, RowStatus.SPLIT if split else RowStatus.READY

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

    def _marks(self, args: Sequence[Any]) -> tuple[list[int], list[int | None]]:
        """Address and version of everything watched; of inference tensors, which have no version, the address alone."""
        watched = [args[i] for i in self.guard.watched]
        addresses = [t.data_ptr() for t in watched]
        try:
            return addresses, [t._version for t in watched]
        except RuntimeError:
            return addresses, [None if t.is_inference() else t._version for t in watched]

    def _announce(self, position: int, why: list[Trigger | None], status: RowStatus) -> None:
        """Tell the device which rows are slow, and what they start from."""
        statuses = []
        for row in self.rows:
            # A row that is known to be short needs no selection.
            short = row.context > 0 and row.context + self.guard.queries < self.min_context
            statuses.append(max(status, RowStatus.SHORT) if short else status)
        slow = [reason is not None for reason in why]
        values: dict[str, Sequence[int]] = {
            "sfi_slow_rows": slow,
            "sfi_status": statuses,
            "sfi_refreshed_at": [
                position if now else row.refreshed_at for row, now in zip(self.rows, slow, strict=True)
            ],
            "sfi_started_at": [row.started_at for row in self.rows],
            "sfi_since": [0 if row.slow_at is None else position - row.slow_at for row in self.rows],
        }
        self.announcement.tell(values)

    def _settle(self, found: Sequence[Sequence[int]]) -> None:
        """Take over what the last slow step left: status, context and held positions of every row."""
        assert self.unsettled is not None
        (position, why), self.unsettled = self.unsettled, None
        c, heads = diagnostics.counters, sum(t.shape[1] for t in self.found.held)
        valid = []
        for b, (row, reason) in enumerate(zip(self.rows, why, strict=True)):
            if reason is None:
                continue
            status, row.context, held = (values[b] for values in found)
            row.valid = status == RowStatus.READY and row.context >= self.min_context
            if row.valid:
                refreshed(row, self.config, position, reason)
                row.support = held / heads
            else:
                self._warn_once(RowStatus(status), b, position)
            valid.append(row.valid)
        c.refreshes += sum(valid)
        c.short_steps += not any(valid)

    def _warn_once(self, status: RowStatus, row: int, position: int) -> None:
        if status in _WARNINGS and status not in self.warned:
            self.warned.add(status)
            log.warning("sfi: %s", _WARNINGS[status].format(row=row, position=position))

    def _count(self, position: int, why: list[Trigger | None]) -> None:
        c = diagnostics.counters
        if any(why):
            c.slow_steps += 1
        else:
            c.fast_steps += 1
        for row, reason in zip(self.rows, why, strict=True):
            if reason is not None:
                c.triggers[reason] += 1
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
