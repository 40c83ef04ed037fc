"""The tiny decoder and the slow-fast step once more, in float64, one row and one token at a time, from the words alone.

Its selector is the oracle's (`kernels/reference.py`), which no optimised kernel uses; other policies are restated here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sfi_compile import policies
from sfi_compile.config import Config
from sfi_compile.kernels import reference
from tests.property.tiny_decoder import BOUNDARIES, SIZE, TinyDecoder

Supports = list[list[list[int]]]
"""Positions by layer and KV head."""

BOUNDARIES_SET = frozenset(BOUNDARIES)
NEAR_TIE = 1e-4
"""Scores closer than this (relative above 1) may swap: the product's are float32, these are float64."""


@dataclasses.dataclass
class Row:
    """One sequence: its cache [layers, Hkv, SIZE, D], and where it begins."""

    start: int
    keys: Tensor
    values: Tensor

    def copy(self) -> Row:
        return Row(self.start, self.keys.clone(), self.values.clone())

    def same(self, other: Row, length: int) -> bool:
        """Both hold the same sequence in their first `length` slots, padding aside."""
        inside = slice(self.start, length)
        close = [
            torch.allclose(a[:, :, inside], b[:, :, inside], rtol=0, atol=1e-6)
            for a, b in ((self.keys, other.keys), (self.values, other.values))
        ]
        return self.start == other.start and all(close)


@dataclasses.dataclass
class Memory:
    """What a row's memory was built from, and when."""

    refreshed_at: int
    at_boundary: bool
    supports: Supports
    next_position: int
    row: Row
    """The sequence up to `next_position`."""

    def grown(self, position: int) -> Supports:
        """sink, selected, and the recent segment up to `position`."""
        tail = list(range(self.refreshed_at + 1, position + 1))
        return [[[*held, *tail] for held in layer] for layer in self.supports]


@dataclasses.dataclass
class Past:
    """What the slow steps of a row's sequence have attended to."""

    next_position: int
    row: Row
    """The sequence up to `next_position`."""
    total: Tensor
    """[layers, Hkv, SIZE]."""
    slow_at: int
    """Position of the last of these steps."""

    def goes_on(self, row: Row, position: int) -> bool:
        """Whether this is the same sequence."""
        return position == self.next_position and row.same(self.row, position)


def must_be_slow(memory: Memory | None, row: Row, position: int, tokens: list[int], config: Config) -> str | None:
    """Why a row that is fed tokens at `position` and after may not be fast, by the rules."""
    if memory is None:
        return "no memory"
    if position != memory.next_position:
        return "another position"
    if not row.same(memory.row, position):
        return "another sequence"
    since = position + len(tokens) - 1 - memory.refreshed_at
    if since >= config.refresh_interval:
        return "interval"
    cooling = memory.at_boundary and since <= config.sentence_cooldown
    if not BOUNDARIES_SET.isdisjoint(tokens) and since >= config.min_refresh_gap and not cooling:
        return "boundary"
    return None


class Oracle:
    """The decoder's weights in float64."""

    def __init__(self, model: TinyDecoder) -> None:
        self.variant = model.variant
        self.config = model.variant.config
        self.weights = {name: parameter.double() for name, parameter in model.named_parameters()}

    def new_row(self, start: int) -> Row:
        shape = (self.variant.layers, self.variant.kv_heads, SIZE, self.variant.dim)
        return Row(start, torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def step(self, row: Row, token: int, position: int, supports: Supports | None) -> tuple[Tensor, list[Tensor]]:
        """Feed a token: logits [VOCAB], and the queries [Hq, 1, D] of every layer. `supports` None: dense."""
        w, v = self.weights, self.variant
        place = max(position - row.start, 0)
        x = w["embed.weight"][token]
        if not v.rotary:
            x = x + w["places.weight"][place]
        queries = []
        for i in range(v.layers):
            h = self._rms(x)
            q, k, value = (self._project(f"layers.{i}.{name}", h) for name in "qkv")
            if v.rotary:
                q, k = self._rotated(q, place), self._rotated(k, place)
            row.keys[i, :, position], row.values[i, :, position] = k, value
            queries.append(q[:, None])
            held = None if supports is None else supports[i]
            site = (v.dim**-0.5, held, v.softcap or None, w.get(f"layers.{i}.sinks"))
            out = reference.attention(q[:, None], row.keys[i], row.values[i], self.mask(row, position), *site)
            x = x + w[f"layers.{i}.o.weight"] @ out.flatten()
            x = x + w[f"layers.{i}.down.weight"] @ torch.tanh(w[f"layers.{i}.up.weight"] @ self._rms(x))
        return w["head.weight"] @ self._rms(x), queries

    def logits(self, row: Row, position: int, queries: list[Tensor]) -> list[Tensor]:
        """Of a step whose last token is at `position`: [Hkv, rows, SIZE] by layer; `queries` [Hq, Q, D] likewise."""
        count = queries[0].shape[1]
        mask = torch.cat([self.mask(row, t) for t in range(position - count + 1, position + 1)], 1)
        form = (mask, self.variant.dim**-0.5, self.variant.softcap or None)
        return [reference.logits(q, row.keys[i], *form) for i, q in enumerate(queries)]

    def attended(self, row: Row, position: int, queries: list[Tensor]) -> Tensor:
        """What such a step attends to, summed over its query heads of a KV head and its tokens: [layers, Hkv, SIZE]."""
        total = torch.zeros_like(row.keys[..., 0])
        for i, layer in enumerate(self.logits(row, position, queries)):
            for h, of_head in enumerate(layer):
                for one in of_head:
                    if (one > -torch.inf).any():
                        total[i, h] += one.softmax(-1)
        return total

    def refresh(
        self, row: Row, position: int, queries: list[Tensor], found: Supports, history: Tensor | None
    ) -> Supports:
        """The supports after a slow step whose last token is at `position`; `queries` [Hq, Q, D] of every layer.

        `found`, the product's, wins where it differs by near ties alone; AssertionError where it differs by more.
        """
        spec, allowed = self.config.selector(), self.allowed(row, position)
        cand = reference.candidates(allowed, position, spec.sink, spec.recent)
        supports = []
        for i, logits in enumerate(self.logits(row, position, queries)):
            past = None if history is None else history[i]
            scores = self._scores(logits, row.keys[i], row.values[i], allowed, cand, past)
            k = self.variant.budgets[i] if self.variant.budgets else spec.k_head
            selected = [reference.best(of_head, cand, k) for of_head in scores]
            expected = reference.support(allowed, position, selected, spec)
            if found[i] != expected:
                for h, held in enumerate(found[i]):
                    assert len(held) == len(set(held)) == len(expected[h]), (i, h, held, expected[h])
                    last = float(scores[h][selected[h]].min()) if selected[h] else 0.0
                    for t in set(held) ^ set(expected[h]):
                        near = cand[t] and abs(float(scores[h][t]) - last) <= NEAR_TIE * max(1.0, abs(last))
                        assert near, f"layer {i}, head {h}: {held} instead of {expected[h]}"
            supports.append(found[i])
        return supports

    def left(self, tokens: int) -> float:
        """What is left of a history at a slow step, so many tokens after the last one."""
        policy = policies.parse(self.config.policy)
        if isinstance(policy, policies.Reach):
            return policy.fading**tokens
        assert isinstance(policy, policies.H2O)
        return policy.decay

    def _scores(
        self, logits: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, cand: Tensor, history: Tensor | None
    ) -> Sequence[Tensor]:
        """Of each KV head, [SIZE], by the variant's policy; in logs."""
        policy = policies.parse(self.config.policy)
        if policy.name == "sfi":
            return list(reference.score(logits, keys, allowed, cand, self.config.selector()))
        if isinstance(policy, policies.Reach):
            assert history is not None
            taken = history * values.norm(dim=-1).clamp_min(reference.NORM_FLOOR)
            return [reference.carried(f, policy.weight, policy.ahead, policy.decay).log() for f in taken]
        if history is not None:
            return list(history.log())
        mean = logits.softmax(-1).mean(1)
        if isinstance(policy, policies.SnapKV):
            reach = policy.pool // 2
            wide = [[float(of_head[max(t - reach, 0) : t + reach + 1].max()) for t in range(SIZE)] for of_head in mean]
            mean = torch.tensor(wide, dtype=torch.float64)
        return list(mean.log())

    def allowed(self, row: Row, position: int) -> Tensor:
        slots = torch.arange(SIZE)
        return (slots >= row.start) & (slots <= position)

    def mask(self, row: Row, position: int) -> Tensor:
        """What is added to the logits of one token: [Hq, 1, SIZE]."""
        heads = self.variant.kv_heads * self.variant.group
        bias = torch.zeros(heads, 1, SIZE, dtype=torch.float64)
        if self.variant.alibi:
            for h in range(heads):
                bias[h] = 0.5 ** (h + 1) * (torch.arange(SIZE) - position)
        return bias.masked_fill(~self.allowed(row, position), -torch.inf)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return (self.weights[f"{name}.weight"] @ x).reshape(-1, self.variant.dim)

    @staticmethod
    def _rms(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    @staticmethod
    def _rotated(x: Tensor, place: int) -> Tensor:
        """Pairs (i, i + D/2) as complex numbers, turned by place * 100^(-2i/D)."""
        half = x.shape[-1] // 2
        turned = torch.complex(x[:, :half], x[:, half:])
        angle = place * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = turned * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)
