"""Refreshes for the tests of the selector, and what a refresh must be.

Scores are float32, so they are compared within `score_error`: a forward error bound that follows the selector's own
formulas from the rounding of each operation (unit roundoff 2^-24), to which nothing is fitted. Its one delicate part
is lambda, a ratio of differences: where f is close to r its float32 value is arbitrary, so the bound takes in every
lambda that the rounded sums allow. Selections must then equal the oracle's except among scores closer than the bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sfi_compile.config import POSITION_BETA, PRESETS, Config, SelectorSpec
from sfi_compile.kernels import reference, selector

INF = math.inf
ROUND = 2.0**-24
PUBLISHED = sorted(name for name, options in PRESETS.items() if options["policy"] == "sfi")
"""The presets of the selector."""


def score_of(logits: Tensor, keys: Tensor, cand: Tensor, spec: SelectorSpec) -> Tensor:
    return selector.score(logits, keys, selector.log_position(cand, spec), spec)


def select_of(logits: Tensor, keys: Tensor, cand: Tensor, spec: SelectorSpec) -> Tensor:
    return selector.top_k(score_of(logits, keys, cand, spec), cand, min(spec.k_head, logits.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Case:
    """One refresh of one row: what the selector sees, and what the oracle needs beside it."""

    logits: Tensor
    keys: Tensor
    allowed: Tensor
    position: int
    spec: SelectorSpec

    @property
    def cand(self) -> Tensor:
        return reference.candidates(self.allowed, self.position, self.spec.sink, self.spec.recent)

    def score(self) -> Tensor:
        return score_of(self.logits, self.keys, self.cand, self.spec)

    def select(self) -> Tensor:
        return select_of(self.logits, self.keys, self.cand, self.spec)

    def oracle(self) -> Tensor:
        return reference.score(self.logits, self.keys, self.allowed, self.cand, self.spec)


def spec_with(preset: str = "paper-speed", **changes: Any) -> SelectorSpec:
    small = {"k_head": 6, "sink": 2, "recent": 4, "nms_window": 6}
    return Config.from_options({"preset": preset, **small, **changes}).selector()


def draw_values(g: torch.Generator, kind: str, *shape: int) -> Tensor:
    x = torch.randn(*shape, generator=g)
    if kind == "constant":
        return torch.full(shape, float(x.flatten()[0]))
    if kind == "quantised":
        return (x * 1.5).round()
    if kind == "huge":
        return x.sign() * 1e4 + x
    if kind == "dominant":
        x[..., int(torch.randint(shape[-1], (), generator=g))] += 30
    return 3 * x


@st.composite
def cases(draw: st.DrawFn) -> Case:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    heads, rows, width = (draw(st.integers(1, high)) for high in (5, 6, 8))
    n = draw(st.sampled_from([48, 40, 31, 20, 10, 4, 2, 1]))
    kind = st.sampled_from(["normal", "constant", "quantised", "huge", "dominant"])
    logits = draw_values(g, draw(kind), heads, rows, n)
    keys = draw_values(g, draw(kind), heads, width, n).transpose(1, 2).contiguous()
    allowed = torch.rand(n, generator=g) < draw(st.sampled_from([1.0, 0.8, 0.5, 0.1]))
    position = draw(st.sampled_from([n - 1, n - 1, n // 2]))
    allowed[position + 1 :] = False
    spec = spec_with(
        preset=draw(st.sampled_from(PUBLISHED)),
        k_head=draw(st.integers(1, 50)),
        sink=draw(st.integers(0, 4)),
        recent=draw(st.integers(1, 8)),
        nms_window=draw(st.integers(0, 12)),
        alpha=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        norm_weight=draw(st.sampled_from([0.0, 1.0])),
        position_weight=draw(st.sampled_from([0.0, 0.7])),
        lambda_clip=draw(st.sampled_from([0.0, 0.01, 0.35, 1.0])),
        lambda_clip_multi=draw(st.sampled_from([0.0, 0.01, 0.25, 1.0])),
    )
    return Case(logits.masked_fill(~allowed, -INF), keys, allowed, position, spec)


def lambda_range(f: Tensor, r: Tensor, e_f: float, e_r: float, clip: float) -> tuple[float, float]:
    """Every lambda that float32 can find, f and r having relative errors e_f and e_r, however the sums are written."""
    ff, fr, rr = float(f @ f), float(f @ r), float(r @ r)
    summing = (len(f) + 4) * ROUND
    top, bottom = float(f @ (f - r)), float((f - r) @ (f - r))
    d_top = (2 * e_f + summing) * ff + (e_f + e_r + summing) * fr
    d_bottom = d_top + (e_f + e_r + summing) * fr + (2 * e_r + summing) * rr
    if bottom <= d_bottom:
        return 0.0, clip
    low, high = (top - d_top) / (bottom + d_bottom), (top + d_top) / (bottom - d_bottom)
    return min(max(low * (1 - 4 * ROUND), 0.0), clip), min(max(high * (1 + 4 * ROUND), 0.0), clip)


def blend(log_f: Tensor, log_r: Tensor, lam: float) -> Tensor:
    share = torch.tensor(lam, dtype=torch.float64)
    return torch.logaddexp(log_f + torch.log1p(-share), log_r + torch.log(share))


def score_error(case: Case) -> Tensor:
    """How far the float32 score of each candidate may be from the oracle's: float64 [H, N], 0 off the candidates."""
    spec, cand, (heads, rows, _), width = case.spec, case.cand, case.logits.shape, case.keys.shape[-1]
    n, ln_n = len(cand), math.log(len(cand))
    clip = spec.lambda_clip if rows == 1 else spec.lambda_clip_multi
    bounds, size = torch.zeros(heads, n, dtype=torch.float64), 0.0
    if not cand.any():
        return bounds
    softmax = n + 2 + 2 * ln_n  # sum, exponentials, and logarithm of a logsumexp over the positions
    for h in range(heads):
        # Evidence: softmax, scaling by alpha and the mean over rows divided by alpha again, renormalisation.
        biggest = float(case.logits[h][:, case.allowed].abs().max())
        log_p = 2 * biggest + ln_n
        mean = rows * log_p if spec.alpha == 0 else 4 * log_p + (rows + 4 + 2 * math.log(rows)) / spec.alpha
        e_f = 2 * ROUND * ((6 * biggest + softmax) + mean + (4 * log_p + softmax))
        # Prior: the norm's sum of squares, the power of u, and log(1 - u), whose argument is as small as 1/n.
        norms = case.keys[h][cand].double().norm(dim=-1).clamp_min(reference.NORM_FLOOR).log().abs()
        by_norm = spec.norm_weight * spec.norm_gamma
        size_r = by_norm * float(norms.max()) + spec.position_weight * (POSITION_BETA + spec.position_eta * ln_n)
        powers = POSITION_BETA * (spec.position_power + 4) + spec.position_eta * (2 * n + 2 * ln_n)
        e_r = 2 * ROUND * (by_norm * (width + 2) + spec.position_weight * powers + 14 * size_r + softmax)
        # Fusion.
        log_f = reference.log_evidence(case.logits[h], case.allowed, cand, spec.alpha)[cand]
        log_r = reference.log_prior(case.keys[h], cand, spec)[cand]
        low, high = (blend(log_f, log_r, x) for x in lambda_range(log_f.exp(), log_r.exp(), e_f, e_r, clip))
        magnitude = torch.maximum(low.abs(), high.abs())
        bounds[h, cand] = max(e_f, e_r) + (high - low).abs() + 8 * ROUND * (1 + magnitude)
        size = max(size, float(magnitude.max()))
    # Refinement: each step carries the bound of what it reads on to what it writes.
    radius = spec.nms_window // 2
    window = torch.nn.functional.max_pool1d(bounds[None], 2 * radius + 1, 1, radius)[0]
    size *= 1 + spec.nms_alpha
    bounds = (1 + spec.nms_alpha) * bounds + spec.nms_alpha * window + 4 * ROUND * size
    if heads > 2:
        across = (bounds + bounds.amax(dim=0)) / spec.exclusivity_temperature
        rounding = 8 * ROUND * (size / spec.exclusivity_temperature + heads + 3)
        bounds = bounds + spec.exclusivity_alpha * (across + rounding) + 2 * ROUND * size
    return bounds.masked_fill(~cand, 0.0)


def assert_scores(scores: Tensor, expected: Tensor, error: Tensor, cand: Tensor) -> None:
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    assert (scores[:, ~cand] == -INF).all()
    off = (scores[:, cand].double() - expected[:, cand]).abs()
    assert (off <= error[:, cand]).all(), f"off by {off.max():.3g}; allowed: {error.max():.3g}"


def chosen_of(row: Tensor) -> list[int]:
    """The positions in a row of indices, having checked its layout: ascending and distinct, then -1 to the end."""
    chosen = [t for t in row.tolist() if t != -1]
    assert row.tolist() == chosen + [-1] * (len(row) - len(chosen))
    assert chosen == sorted(set(chosen))
    return chosen


def assert_layout(indices: Tensor, heads: int, k: int, cand: Tensor) -> None:
    assert indices.dtype == torch.int64
    assert indices.shape == (heads, min(k, len(cand)))
    for row in indices:
        chosen = chosen_of(row)
        assert len(chosen) == min(k, int(cand.sum()))
        assert cand[chosen].all()


def assert_selection(case: Case) -> None:
    """The oracle's positions, except where scores are closer to the k-th than two of them may be off together."""
    indices = case.select()
    assert_layout(indices, case.logits.shape[0], case.spec.k_head, case.cand)
    expected = reference.select(case.logits, case.keys, case.allowed, case.position, case.spec)
    for row, right, scores, error in zip(indices, expected, case.oracle(), score_error(case), strict=True):
        disputed = sorted(set(chosen_of(row)) ^ set(right))
        if disputed:
            kth = scores[right].min()
            assert ((scores[disputed] - kth).abs() <= 2 * error.max()).all(), f"{disputed} against {right}"
