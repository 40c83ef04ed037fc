"""Sequences under decoding: every action is taken by the compiled decoder and by the oracle, and compared."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import sfi_compile
from sfi_compile import policies
from sfi_compile.passes.base import MOST_QUERIES
from sfi_compile.runtime import DecodeRunner
from tests.property.oracle_model import Memory, Oracle, Past, Row, Supports, must_be_slow
from tests.property.tiny_decoder import SIZE, Recorder, Variant, compiled

TOLERANCE = 2e-4
"""Of the largest logit. float32 against float64 stays below 1e-5 here; a wrong token in a support shows above 1e-2."""
EXACT_TOLERANCE = 1e-9
"""The same of a decoder in float64, given the supports: these, and histories, are float32 in any case."""


@dataclasses.dataclass(eq=False)
class Session:
    """A cache and the rows in it."""

    keys: list[Tensor]
    values: list[Tensor]
    start: Tensor
    rows: list[Row]
    inference: bool
    length: int = 0
    untouched_since: object = None
    """The compiled step after which nothing but compiled steps happened."""

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def room(self) -> int:
        return SIZE - self.length


class World:
    """One compiled decoder, the caches that it serves, and what the oracle knows of its memories."""

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        self.model, self.call = compiled(variant)
        self.model.seed(seed)
        self.oracle = Oracle(self.model)
        self.config = variant.config
        self.tolerance = EXACT_TOLERANCE if variant.dtype is torch.float64 else TOLERANCE
        self.policy = policies.parse(self.config.policy)
        self.memories: dict[int, list[Memory | None]] = {}
        self.pasts: dict[int, list[Past | None]] = {}
        self.served: dict[int, object] = {}
        self.fast_rows = self.slow_rows = 0
        sfi_compile.reset()

    def mode(self, session: Session) -> AbstractContextManager[None]:
        return torch.inference_mode() if session.inference else torch.no_grad()

    # Making and changing sequences

    def new(self, starts: list[int], inference: bool = False, junk: float = 50.0) -> Session:
        """An empty cache; unwritten slots hold junk."""
        v = self.model.variant
        shape = (len(starts), v.kv_heads, SIZE, v.dim)
        with torch.inference_mode() if inference else torch.no_grad():
            keys, values = ([junk * torch.randn(shape, dtype=v.dtype) for _ in range(v.layers)] for _ in "kv")
            start = torch.tensor(starts)
        return Session(keys, values, start, [self.oracle.new_row(s) for s in starts], inference)

    def feed(self, session: Session, tokens: list[list[int]], through_compiled: bool = False) -> None:
        """Append tokens outside the decode graph of one token: the eager decoder, or the compiled one."""
        count = len(tokens[0])
        if through_compiled and count <= MOST_QUERIES:
            self.decode_several(session, tokens)
            return
        position = torch.arange(session.length, session.length + count)
        with self.mode(session):
            call = self.call if through_compiled else self.model
            logits = call(torch.tensor(tokens), session.keys, session.values, position, session.start)
        for b, row in enumerate(session.rows):
            for i, token in enumerate(tokens[b]):
                at = session.length + i
                expected, _ = self.oracle.step(row, token, at, None)
                if at >= row.start:
                    self._compare(logits[b, i], expected, f"row {b} at {at}, fed")
        session.length += count
        session.untouched_since = None

    def crop(self, session: Session, length: int) -> None:
        session.length = length
        session.untouched_since = None

    def reset(self, session: Session, starts: list[int], zero: bool) -> None:
        """The same tensors for new sequences."""
        with self.mode(session):
            if zero:
                for tensor in (*session.keys, *session.values):
                    tensor.zero_()
            session.start = torch.tensor(starts)
        session.rows = [self.oracle.new_row(s) for s in starts]
        self.crop(session, 0)

    def reorder(self, session: Session, order: list[int], in_place: bool) -> None:
        """Row i becomes what row `order[i]` was."""
        index = torch.tensor(order)
        with self.mode(session):
            for tensors in (session.keys, session.values):
                for i, tensor in enumerate(tensors):
                    moved = tensor.index_select(0, index)
                    tensors[i] = tensor.copy_(moved) if in_place else moved
            session.start = session.start[index]
        session.rows = [session.rows[i].copy() for i in order]
        session.untouched_since = None

    def copy(self, session: Session) -> Session:
        with self.mode(session):
            keys, values = ([t.clone() for t in tensors] for tensors in (session.keys, session.values))
        rows = [row.copy() for row in session.rows]
        return Session(keys, values, session.start, rows, session.inference, session.length)

    def forget(self) -> None:
        """`sfi_compile.reset()`."""
        sfi_compile.reset()
        self.memories.clear()
        self.pasts.clear()
        self.served.clear()

    # A decode step

    def decode(self, session: Session, tokens: list[int]) -> Tensor:
        """One compiled step of one token a row; its logits [B, VOCAB]."""
        return self.decode_several(session, [[t] for t in tokens])[:, 0]

    def decode_several(self, session: Session, tokens: list[list[int]]) -> Tensor:
        """One compiled step, compared with the oracle in everything: who is slow, the outputs, the memories.

        Returns:
            Logits [B, Q, VOCAB].
        """
        count = len(tokens[0])
        first, last = session.length, session.length + count - 1
        before = sfi_compile.stats()
        Recorder.forget()
        with self.mode(session):
            at = torch.arange(first, last + 1)
            logits = self.call(torch.tensor(tokens), session.keys, session.values, at, session.start)
        runner = Recorder.last
        assert runner is not None, "the step did not run in a decode graph"
        runner.settle()
        memories = self.memories.setdefault(id(runner), [None] * session.batch)
        uninterrupted = session.untouched_since is not None and self.served.get(id(runner)) is session.untouched_since
        slow = 0
        for b, (row, text) in enumerate(zip(session.rows, tokens, strict=True)):
            why = must_be_slow(memories[b], row, first, text, self.config)
            is_slow = not runner.rows[b].valid or runner.rows[b].refreshed_at == last
            slow += is_slow
            assert is_slow or why is None, f"row {b} is fast at {last} in spite of: {why}"
            assert not (is_slow and why is None and uninterrupted), f"row {b} is slow at {last} for no reason"
            # A step that may be slow for another reason counts as the product says.
            counted = uninterrupted or runner.rows[b].quiet_until > last
            at_boundary = why == "boundary" and counted
            past = self._past(runner, session, b, uninterrupted)
            memories[b] = self._row_step(runner, session, b, text, logits[b], is_slow, at_boundary, memories[b], past)
        after = sfi_compile.stats()
        assert after.slow_steps - before.slow_steps == (slow > 0)
        assert after.fast_steps - before.fast_steps == (slow == 0)
        assert sum(after.triggers.values()) - sum(before.triggers.values()) == slow
        self.slow_rows += slow
        self.fast_rows += session.batch - slow
        session.length += count
        session.untouched_since = self.served[id(runner)] = object()
        return logits

    def _row_step(
        self,
        runner: DecodeRunner,
        session: Session,
        b: int,
        tokens: list[int],
        out: Tensor,
        slow: bool,
        at_boundary: bool,
        memory: Memory | None,
        past: Past | None,
    ) -> Memory | None:
        row, first = session.rows[b], session.length
        last = first + len(tokens) - 1
        found = self._held(runner, b)
        if not slow:
            assert memory is not None
            assert found == memory.grown(last)
        # Padding may attend to nothing. Written out, it then sees all slots alike; what unwritten ones hold no oracle
        # knows.
        blind = self.model.variant.form == "sdpa"
        queries = []
        for i, token in enumerate(tokens):
            at = first + i
            supports = None if slow or memory is None else memory.grown(at)
            expected, step_queries = self.oracle.step(row, token, at, supports)
            queries.append(step_queries)
            if at >= row.start or blind:
                self._compare(out[i], expected, f"row {b} at {at}, {'slow' if slow else 'fast'}")
        by_layer = [torch.cat(layer, 1) for layer in zip(*queries, strict=True)]
        # With padding that sees unwritten slots, a step is like one that is not finite: nothing is kept of it.
        known = blind or first >= row.start
        history = (
            self._history(runner, row, b, last, by_layer, slow, known, past) if self.policy.keeps_history else None
        )
        if not slow:
            return dataclasses.replace(memory, next_position=last + 1, row=row.copy())  # type: ignore[type-var]
        long_enough = last + 1 - row.start >= max(self.config.min_context or 0, 1) and known
        assert runner.rows[b].valid == long_enough
        if not long_enough:
            return None
        supports = self.oracle.refresh(row, last, by_layer, found, history)
        return Memory(last, at_boundary, supports, last + 1, row.copy())

    def _history(
        self,
        runner: DecodeRunner,
        row: Row,
        b: int,
        last: int,
        queries: list[Tensor],
        slow: bool,
        known: bool,
        past: Past | None,
    ) -> Tensor:
        """The history of a row after a step whose last token is at `last`, [layers, Hkv, SIZE]; compared."""
        assert slow or past is not None
        total, slow_at = (torch.zeros_like(row.keys[..., 0]), last) if past is None else (past.total, past.slow_at)
        if slow:
            # By the tokens since the last slow step, whether there were steps between them or not.
            total = self.oracle.left(last - slow_at) * total
            if known:
                total = total + self.oracle.attended(row, last, queries)
            slow_at = last
        self.pasts[id(runner)][b] = Past(last + 1, row.copy(), total, slow_at)
        found = torch.stack([runner.state[f"sfi_history_{i}"][b] for i in range(runner.sites)])
        assert found.shape[-1] >= SIZE
        self._compare(found[..., :SIZE], total, f"history of row {b} at {last}", TOLERANCE)
        return total

    def _past(self, runner: DecodeRunner, session: Session, b: int, uninterrupted: bool) -> Past | None:
        """What the history of a row is before a step: None where its sequence begins, or none is kept.

        It must begin anew with another sequence, and may where something happened to the cache.
        """
        if not self.policy.keeps_history:
            return None
        row, first = session.rows[b], session.length
        past = self.pasts.setdefault(id(runner), [None] * session.batch)[b]
        goes_on = past is not None and past.goes_on(row, first)
        begins = runner.rows[b].started_at == first
        assert begins or goes_on, f"row {b} at {first} has the history of another sequence"
        assert not (begins and goes_on and uninterrupted), f"row {b} has lost its history at {first}"
        return None if begins else past

    @staticmethod
    def _held(runner: DecodeRunner, b: int) -> Supports:
        """The positions in a row's memories, ascending, by layer and head."""
        layers = range(runner.sites)
        held = [runner.state[f"sfi_held_{i}"][b].tolist() for i in layers]
        return [[sorted(t for t in head if t >= 0) for head in layer] for layer in held]

    def _compare(self, actual: Tensor, expected: Tensor, where: str, tolerance: float | None = None) -> None:
        error = float((actual.double() - expected).abs().max())
        most = (tolerance or self.tolerance) * float(expected.abs().max())
        assert error <= most, f"{where}: off by {error:.2g}"
