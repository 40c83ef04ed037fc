"""What attention of one decode step moves and computes, as formulas of the context, and where SFI starts to win.

This room imports `config` of ours and sympy, nothing of torch. `FORMULAS` is the model:
one site each, in the symbols below; `CostModel` fills in numbers and sums over the sites.

Decode attention is bound by memory traffic, so bytes alone decide the threshold; FLOPs are for the reader. Doubts are
settled in favour of dense attention: it moves only valid tokens (a static cache reads every allocated position) and
no logits, while a fast step reads a full memory. Work that all steps share (projections, cache update) is left out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import sympy

from sfi_compile.config import Config

# Context (tokens), batch, query heads, KV heads, key and value width, queries, bytes an element, slots of a memory.
N, B, Hq, Hkv, Dk, Dv, Q, E, M = sympy.symbols("N B Hq Hkv Dk Dv Q E M", integer=True, positive=True)
# 1 if the dense graph repeats K/V to the query heads, else 0; 1 if it reads a mask, else 0; share of slow steps, 0..1.
R, A, S = sympy.symbols("R A S", nonnegative=True)

_FP32, _MASK, _INDEX = 4, 1, 8  # bytes: logits and scores, a boolean mask, the widest index of a support slot
_LOGIT_PASSES = 3  # written once; read for the log-sum-exp and for the evidence; an estimate
_SCORE_PASSES = 16  # reads and writes of evidence, norms, prior, fusion, refinement and top-k; an estimate
_LOGIT_FLOPS, _SCORE_FLOPS = 4, 32  # the selector's arithmetic per logit and per candidate; an estimate

_token = B * Hkv * (Dk + Dv) * E  # bytes: K and V of one position
_query = B * Hq * Q * (Dk + Dv) * E  # bytes: the query read and the output written
_mask = A * B * Q * _MASK  # bytes of one position, shared by the heads
_logits, _key_norms, _scores = _LOGIT_PASSES * _FP32 * B * Hq * Q, B * Hkv * Dk * E, _SCORE_PASSES * _FP32 * B * Hkv
_slots = M * (_token + B * Hkv * _INDEX)  # bytes: a full memory and its index
_pair = 2 * B * Hq * Q * (Dk + Dv)  # FLOPs: one position's part of both products
_selector = _LOGIT_FLOPS * B * Hq * Q + 2 * B * Hkv * Dk + _SCORE_FLOPS * B * Hkv  # FLOPs of one position

FORMULAS: dict[str, Any] = {
    # The repeated copy is Hq / Hkv times K and V, written and read again.
    "dense_bytes": N * (_token * (1 + 2 * R * Hq / Hkv) + _mask) + _query,
    # Heads are never repeated here; key norms read K again; the support is read once more and written as memory.
    "slow_bytes": N * (_token + _mask + _logits + _key_norms + _scores) + M * _token + _slots + _query,
    # No N: the memory is read, the new tokens are appended to it.
    "fast_bytes": _slots + Q * _token + _query,
    "dense_flops": N * _pair,
    "slow_flops": N * (_pair + _selector),
    "fast_flops": M * _pair,
}
"""Bytes and FLOPs of one site in one step; `mean` is the average step."""
for _unit in ("bytes", "flops"):
    FORMULAS[f"mean_{_unit}"] = S * FORMULAS[f"slow_{_unit}"] + (1 - S) * FORMULAS[f"fast_{_unit}"]

# A whole number, or the sympy expression of a dynamic size (of a SymInt, its `node.expr`).
Size: TypeAlias = "int | sympy.Expr"
_SIZES = {"batch": B, "query_heads": Hq, "kv_heads": Hkv, "key_dim": Dk, "value_dim": Dv, "query_len": Q, "itemsize": E}


@dataclasses.dataclass(frozen=True)
class SiteShape:
    """The sizes of one site: Q `[batch, query_heads, query_len, key_dim]`, K `[batch, kv_heads, context, key_dim]`,
    V `[batch, kv_heads, context, value_dim]`. Raises ValueError for a size that is not a positive whole number (or the
    expression of one, without `N`), a flag that is not a bool, query heads that are no multiple of the KV heads."""

    batch: Size
    query_heads: Size
    kv_heads: Size
    key_dim: Size
    value_dim: Size
    query_len: Size
    context: Size
    """Positions allocated; printed only, the formulas count valid tokens."""
    itemsize: Size
    """Bytes of one cached element."""
    repeats_heads: bool
    """The dense graph writes out K and V repeated to the query heads."""
    masked: bool
    """The dense graph reads a mask."""

    def __post_init__(self) -> None:
        for name in (*_SIZES, "context"):
            size = getattr(self, name)
            if isinstance(size, sympy.Expr) and size.free_symbols:
                # Of a shift such as s0 - 1 the sign is unknown; only what is known to be wrong is refused.
                fits = size.is_integer is not False and size.is_positive is not False
                fits = fits and (name == "context" or not size.has(N))
            else:
                fits = isinstance(size, (int, sympy.Integer)) and not isinstance(size, bool) and bool(size >= 1)
            if not fits:
                raise ValueError(f"site shape: {name} is {size!r}; allowed: whole numbers >= 1, expressions without N")
        for name in ("repeats_heads", "masked"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"site shape: {name} is {getattr(self, name)!r}; allowed: True or False")
        if sympy.Mod(self.query_heads, self.kv_heads).is_zero is False:
            raise ValueError(f"site shape: query_heads is {self.query_heads}; allowed: multiples of {self.kv_heads}")


def largest_slow_share(config: Config) -> Fraction:
    """Upper bound of the share of a row's steps that are slow (docs/design.md, "Steps").

    Without boundary tokens a row is slow every `refresh_interval` steps. With them, at the earliest `min_refresh_gap`
    steps after a refresh and after the cooldown; the bound takes a text of nothing but boundaries, so real text costs
    less. Rows count alone: in a slow step of the batch only the slow rows read their context.
    """
    period = config.refresh_interval
    if config.boundary_token_ids:
        period = min(period, max(config.min_refresh_gap, config.sentence_cooldown + 1))
    return Fraction(1, period)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Attention of one decode step, summed over the sites: sympy expressions, linear in the context `N` (tokens), in
    bytes and FLOPs. Build it with `CostModel.of`."""

    shapes: tuple[SiteShape, ...]
    config: Config
    slow_share: Fraction
    dense_bytes: sympy.Expr
    slow_bytes: sympy.Expr
    fast_bytes: sympy.Expr
    mean_bytes: sympy.Expr
    dense_flops: sympy.Expr
    slow_flops: sympy.Expr
    fast_flops: sympy.Expr
    mean_flops: sympy.Expr

    @classmethod
    def of(cls, shapes: Sequence[SiteShape], config: Config, slow_share: Fraction | float | None = None) -> CostModel:
        """The model of these sites. `slow_share` (0..1) is `largest_slow_share(config)` unless it was measured. Raises
        ValueError when there are no shapes or the share is outside 0..1."""
        if not shapes:
            raise ValueError("cost model: shapes is empty; allowed: at least one SiteShape")
        share = largest_slow_share(config) if slow_share is None else slow_share
        if isinstance(share, bool) or not isinstance(share, (int, float, Fraction)) or not 0 <= share <= 1:
            raise ValueError(f"cost model: slow_share is {slow_share!r}; allowed: a number from 0 to 1")
        share = Fraction(str(share))  # 0.1 means a tenth, not the float next to it
        totals = dict.fromkeys(FORMULAS, sympy.Integer(0))
        for shape, count in Counter(shapes).items():
            numbers = {symbol: sympy.sympify(getattr(shape, name)) for name, symbol in _SIZES.items()}
            rest = {R: int(shape.repeats_heads), A: int(shape.masked), M: config.memory_slots, S: share}
            numbers |= {symbol: sympy.Rational(value) for symbol, value in rest.items()}
            for name, formula in FORMULAS.items():
                totals[name] += count * formula.xreplace(numbers)
        return cls(tuple(shapes), config, share, **{name: sympy.expand(total) for name, total in totals.items()})

    def substitute(self, sizes: Mapping[sympy.Symbol, Size]) -> CostModel:
        """The same model with symbols of dynamic sizes replaced (others ignored). Raises as `SiteShape` does."""
        known = {symbol: sympy.sympify(size) for symbol, size in sizes.items()}
        shapes = []
        for shape in self.shapes:
            held = {name: sympy.sympify(getattr(shape, name)) for name in (*_SIZES, "context")}
            shapes.append(dataclasses.replace(shape, **{name: size.xreplace(known) for name, size in held.items()}))
        return CostModel.of(shapes, self.config, self.slow_share)

    @cached_property
    def break_even(self) -> int | None:
        """Smallest context (tokens) from which on a mean step moves less than dense attention does: the solution of
        dense_bytes = mean_bytes, rounded up. 0 when that holds at every context, None when it never does (refreshing
        costs more than it saves). Raises ValueError when it depends on symbolic sizes: `substitute` them first."""
        gain = sympy.expand(self.dense_bytes - self.mean_bytes)
        # Measured in the bytes of one dense position: sizes that all sites share, such as a dynamic batch, cancel.
        unit = self.dense_bytes.coeff(N, 1)
        slope, offset = sympy.cancel(gain.coeff(N, 1) / unit), sympy.cancel(gain.coeff(N, 0) / unit)
        if not (slope.is_number and offset.is_number):
            names = ", ".join(sorted(str(symbol) for symbol in gain.free_symbols - {N}))
            raise ValueError(f"cost model: break_even depends on {names}; allowed: whole numbers (see substitute)")
        if slope <= 0:
            return 0 if slope == 0 and offset > 0 else None
        return max(0, int(sympy.floor(-offset / slope)) + 1)

    @property
    def threshold(self) -> int | None:
        """Context (tokens) from which rows keep a memory: `min_context` where it is set, else the larger of the memory
        and the break-even, None when SFI never wins. Raises ValueError as `break_even` does."""
        if self.config.min_context is not None:
            return self.config.min_context
        return None if self.break_even is None else max(self.config.memory_slots, self.break_even)

    def as_dict(self) -> dict[str, Any]:
        """Numbers and, as text, expressions, ready for JSON. Raises ValueError as `break_even` does."""
        facts: dict[str, Any] = {name: str(getattr(self, name)) for name in ("slow_share", *FORMULAS)}
        facts |= {"sites": len(self.shapes), "memory_slots": self.config.memory_slots}
        return {**facts, "break_even": self.break_even, "threshold": self.threshold}

    def describe(self) -> str:
        """Sites, formulas, expressions with numbers, break-even and threshold. Raises as `break_even` does."""
        lines = [f"cost model: attention of one decode step, {len(self.shapes)} site(s), N = valid tokens of a row"]
        lines += [f"  {count} x {shape}" for shape, count in Counter(self.shapes).items()]
        lines.append(f"  S = {self.slow_share} of the steps are slow; M = {self.config.memory_slots} memory slots")
        for name, formula in FORMULAS.items():
            shown = "S*slow + (1 - S)*fast" if name.startswith("mean") else formula
            lines += [f"  {name} of a site = {shown}", f"  {name} in all = {getattr(self, name)}"]
        source = "memory or break-even" if self.config.min_context is None else "min_context"
        for name, value in (("break-even", self.break_even), (f"threshold ({source})", self.threshold)):
            lines.append(f"  {name}: {'never' if value is None else f'{value} tokens'}")
        return "\n".join(lines)
