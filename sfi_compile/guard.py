"""What the guard of a decode step asks of the device, and its one read a step.

The runtime decides on plain numbers; this room says where they come from. On a GPU the questions are one captured graph
and one small copy to the host: nothing else of a step waits for the device. Imports `capture`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sfi_compile.capture import captured

log = logging.getLogger("sfi_compile")

CAPTURED = 8
"""Captured questions that are kept: one for each cache in use and each set of questions."""


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


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a step's guard read."""

    spans: tuple[tuple[int, int], ...]
    """First and last of the positions that each group of sites writes, in the order of `GuardInputs.lengths`; a last
    before the first says that they do not follow each other."""
    agree: bool
    """The counters of every group are equal."""
    tokens: tuple[tuple[int, ...], ...]
    """Token ids fed, by row; empty where they were not asked for."""
    same: tuple[bool, ...]
    """By row: the root still holds, before the first position, the fingerprint; empty where it was not asked for."""
    found: tuple[tuple[int, ...], ...]
    """What the last slow step left: status, context and held positions of all heads, by row; empty if not asked for."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Where a slow step leaves what it found: tensors that never move."""

    status: tuple[Tensor, ...]
    """int64 [B] of `RowStatus`, for each device that has sites; the largest counts."""
    context: tuple[Tensor, ...]
    """int64 [B], valid tokens, likewise."""
    held: tuple[Tensor, ...]
    """int64 [B, Hkv, S]: positions in the memories that are counted, -1 for empty."""

    def values(self) -> list[Tensor]:
        """Status, context and number of held positions of all heads, each int64 [B]."""
        device = self.held[0].device
        merged = [torch.stack([t.to(device) for t in each]).amax(0) if len(each) > 1 else each[0]
                  for each in (self.status, self.context)]  # fmt: skip
        counts = [(held >= 0).sum((1, 2)).to(device) for held in self.held]
        return [*merged, torch.stack(counts).sum(0) if len(counts) > 1 else counts[0]]


class Reader:
    """Asks and reads.

    Args:
        guard: where the inputs are.
        with_tokens: whether the token ids matter.
        found: where slow steps leave what they find.
    """

    def __init__(self, guard: GuardInputs, with_tokens: bool, found: Found) -> None:
        self.guard, self.found = guard, found
        self.tokens = guard.tokens if with_tokens else None
        moving = {*guard.position_arguments, *(i for group in guard.counters for i in group)}
        if self.tokens is not None:
            moving.add(self.tokens)
        self.moving = tuple(sorted(moving))
        self.written: list[tuple[int | None, bool]] = []
        """Of each position: the number, None of a tensor, and whether it lists all and not the first alone."""
        self.resting: dict[int, Tensor] | None = None  # copies that captured graphs read; empty: nothing is captured
        self.captured: dict[Any, tuple[dict[int, int], _Captured | None]] = {}
        """By cache and questions: where inputs lie that did not move since, and the graph; None, asked only once."""
        self.answers: Tensor | None = None

    def ask(self, args: Sequence[Any], fingerprint: Tensor | None, settle: bool) -> Callable[[], Reading]:
        """Ask for the numbers of this step; a GPU computes them while the host does something else.

        Args:
            args: the graph's inputs.
            fingerprint: the root's row at the position before the first; None: no row is to be compared.
            settle: whether what the last slow step left is to be read, too.

        Returns:
            Waits for the answer; to be called before the next question. Raises IndexError where the position lies
            outside the cache.
        """
        root = args[self.guard.root]
        ask = self._from_gpu if root.is_cuda else self._asked
        answer = ask({i: args[i] for i in self.moving}, root, fingerprint, settle)
        return lambda: self._parsed(iter(answer()), fingerprint is not None, settle)

    def _questions(
        self, inputs: dict[int, Any], root: Tensor, fingerprint: Tensor | None, settle: bool
    ) -> list[Tensor]:
        """Flat int64 tensors, in the order in which `_parsed` takes them."""
        g = self.guard
        written = [*g.positions(*(inputs[i] for i in g.position_arguments)), *g.fixed_positions]
        flags: list[Tensor] = []
        self.written = [(None, p.numel() > 1) if isinstance(p, Tensor) else (int(p), False) for p in written]
        for position in (p.reshape(-1) for p in written if isinstance(p, Tensor)):
            flags.append(position[:1])
            if position.shape[0] > 1:
                flags += [position[-1:], (position.diff() == 1).all().reshape(1)]
        for group in g.counters:
            counters = torch.stack([inputs[i].to(root.device) for i in group])
            flags.append((counters == counters[0]).all().reshape(1))
        if self.tokens is not None:
            flags.append(inputs[self.tokens].reshape(-1))
        if fingerprint is not None:
            flags.append(self._same_rows(root, fingerprint, written[0]))
        if settle:
            flags += self.found.values()
        # Layers on several devices count each on their own.
        return [flag.to(root.device) for flag in flags]

    def _same_rows(self, root: Tensor, fingerprint: Tensor, position: Tensor | int) -> Tensor:
        """Bool [B]: the root still holds the fingerprint, its row before `position`."""
        g = self.guard
        if isinstance(position, Tensor):
            before = torch.remainder(position.reshape(-1)[:1] - 1, root.shape[g.axis]).to(root.device)
            row = root.index_select(g.axis, before).squeeze(g.axis)
        else:
            row = root.select(g.axis, (position - 1) % root.shape[g.axis])
        same = row == fingerprint
        if g.batch_axis is None:
            return same.all().expand(g.batch)
        return same.movedim(g.batch_axis - (g.batch_axis > g.axis), 0).flatten(1).all(1)

    def _parsed(self, values: Iterator[int], compared: bool, settle: bool) -> Reading:
        g = self.guard
        spans = [self._span(*at, length, values) for at, length in zip(self.written, g.lengths, strict=True)]
        agree = [next(values) for _ in g.counters]
        rows = range(g.batch)
        tokens = () if self.tokens is None else tuple(tuple(next(values) for _ in range(g.queries)) for _ in rows)
        same = tuple(bool(next(values)) for _ in rows) if compared else ()
        found = tuple(tuple(next(values) for _ in rows) for _ in range(3)) if settle else ()
        return Reading(tuple(spans), all(agree), tokens, same, found)

    def _span(self, number: int | None, several: bool, length: int, values: Iterator[int]) -> tuple[int, int]:
        """First and last of the positions that a step writes; a last before the first says that they do not follow."""
        first = next(values) if number is None else number
        last = first + self.guard.queries - 1
        if several:
            last = next(values)
            if not next(values):
                return first, first - 1
        if last >= length:
            raise IndexError(
                f"sfi: position {last} lies outside the cache, which holds {length} positions; "
                "give the cache a larger max_cache_len"
            )
        return (first + length, last + length) if last < 0 else (first, last)  # counted from the end

    def _from_gpu(
        self, inputs: dict[int, Any], root: Tensor, fingerprint: Tensor | None, settle: bool
    ) -> Callable[[], list[int]]:
        """The same numbers through a graph that is captured once for every cache and set of questions."""
        if self.resting is None:
            # Once: the kinds and devices of a graph's inputs never change.
            alike = all(
                isinstance(t, Tensor) and t.device == root.device for t in (*inputs.values(), *self.found.status)
            )
            self.resting = {i: torch.empty_like(value) for i, value in inputs.items()} if alike else {}
        if not self.resting:
            return self._asked(inputs, root, fingerprint, settle)
        key = (root.data_ptr(), root.shape, root.stride(), fingerprint is None, settle)
        if key not in self.captured:
            # Eagerly at first: many a cache answers a question only once, and what is captured must be warm.
            self.captured[key] = {i: value.data_ptr() for i, value in inputs.items()}, None
            while len(self.captured) > CAPTURED:
                self.captured.pop(next(iter(self.captured)))
            return self._asked(inputs, root, fingerprint, settle)
        # What lies where it lay is read there, such as a cache's counters; the rest, such as tokens, is copied.
        known, captured = self.captured[key]
        moved = [i for i, place in known.items() if inputs[i].data_ptr() != place]
        staying = {i: place for i, place in known.items() if i not in moved} if moved else known
        copied = [i for i in inputs if i not in staying]
        if copied:
            torch._foreach_copy_([self.resting[i] for i in copied], [inputs[i] for i in copied])
        if captured is None or moved:
            read = {i: inputs[i] if i in staying else self.resting[i] for i in inputs}
            compute = functools.partial(self._questions, read, root, fingerprint, settle)
            captured = _Captured(root.device, compute, self._host(root.is_cuda))
            self.captured[key] = staying, captured
        return captured.replay()

    def _host(self, pinned: bool) -> Tensor:
        """Where captured graphs leave their answers, long enough for all questions; each is read before the next."""
        if self.answers is None:
            g = self.guard
            most = 3 * len(g.lengths) + len(g.counters) + g.batch * (g.queries + 4)
            self.answers = torch.empty(most, dtype=torch.int64, pin_memory=pinned)
        return self.answers

    def _asked(
        self, inputs: dict[int, Any], root: Tensor, fingerprint: Tensor | None, settle: bool
    ) -> Callable[[], list[int]]:
        parts = self._questions(inputs, root, fingerprint, settle)
        return torch.cat(parts).tolist if parts else list


class _Captured:
    """Numbers that a CUDA graph computes from tensors that stay where they are, and copies to the host.

    Args:
        device: the GPU.
        compute: flat integer tensors; launches work, and waits for none.
        host: int64, pinned: where they go.
    """

    def __init__(self, device: torch.device, compute: Callable[[], list[Tensor]], host: Tensor) -> None:
        def ask() -> None:
            self.values = torch.cat(compute()).long()
            self.host = host[: self.values.shape[0]]
            self.host.copy_(self.values, non_blocking=True)

        self.graph, self.device = captured(device, ask), device
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self) -> Callable[[], list[int]]:
        """Compute anew, and what waits for the numbers."""
        self.graph.replay()
        self.done.record(torch.cuda.current_stream(self.device))  # which need not be the current device's
        return self._arrived

    def _arrived(self) -> list[int]:
        self.done.synchronize()
        return self.host.tolist()
