"""The training-free selector of Slow-Fast Inference, in plain torch with static shapes, so that Inductor compiles it.

One row of the batch at a time: `logits` [kv_heads, rows, N] float32 (rows = query heads of the group x queries of the
step, -inf where attention is not allowed), `keys` [kv_heads, N, key_dim], `candidates` bool [N]. All in logs, all in
float32. Source: arXiv 2603.12038 (Selector) and docs/design.md, "Selector". The oracle is in `reference.py`; neither
imports the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfi_compile.config import POSITION_BETA, SelectorSpec

NEG_INF = float("-inf")
MIN_NORM = 1e-6
"""Key norms are clamped here, so that an all-zero key has a finite prior."""


def renormalise(log_p: Tensor, candidates: Tensor) -> Tensor:
    """Restrict log-probabilities [..., N] to the candidates; their exponentials then sum to one."""
    log_p = torch.where(candidates, log_p, NEG_INF)
    total = torch.logsumexp(log_p, dim=-1, keepdim=True)
    return torch.where(candidates, log_p - total, NEG_INF)


def log_evidence(logits: Tensor, candidates: Tensor, alpha: float) -> Tensor:
    """Power mean over the evidence rows of the attention probabilities, in logs: [H, R, N] → [H, N]."""
    log_p = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    # Off the candidates -inf would turn a mean of logs into NaN gradients of nothing: keep it finite, then mask.
    log_p = torch.where(candidates, log_p, 0.0)
    if alpha == 0.0:
        mean = log_p.mean(dim=1)
    else:
        rows = float(logits.shape[1])
        mean = (torch.logsumexp(alpha * log_p, dim=1) - torch.log(torch.tensor(rows))) / alpha
    return renormalise(mean, candidates)


def log_prior(keys: Tensor, candidates: Tensor, spec: SelectorSpec) -> Tensor:
    """Damps large-norm keys and crowding at the end of the window: [H, N, D], [N] → [H, N]."""
    norms = keys.float().square().sum(-1).sqrt().clamp_min(MIN_NORM)
    count = candidates.sum().clamp_min(1)
    # Rank among the candidates over their number: u in [0, 1), so log(1 - u) is finite.
    u = (candidates.cumsum(0) - 1).clamp_min(0) / count
    position = -POSITION_BETA * u.pow(spec.position_power) + spec.position_eta * torch.log1p(-u)
    prior = spec.norm_weight * (-spec.norm_gamma) * norms.log() + spec.position_weight * position
    return renormalise(prior, candidates)


def fuse(log_f: Tensor, log_r: Tensor, clip: float) -> Tensor:
    """Mix evidence and prior, `s = (1 - λ) f + λ r`, with the λ that minimises ‖s‖², clipped to [0, clip]."""
    ff = (2.0 * log_f).exp().sum(-1, keepdim=True)
    fr = (log_f + log_r).exp().sum(-1, keepdim=True)
    rr = (2.0 * log_r).exp().sum(-1, keepdim=True)
    distance = ff - 2.0 * fr + rr
    lam = torch.where(distance > 0.0, (ff - fr) / distance, 0.0).clamp(0.0, clip)
    return torch.logaddexp(torch.log1p(-lam) + log_f, lam.log() + log_r)


def windowed_max(x: Tensor, radius: int) -> Tensor:
    """`max_{|i-t| <= radius} x_i` along the last axis, by doubling: log2(window) shifted maxima instead of one pool."""
    window, size = 2 * radius + 1, x.shape[-1]
    padded = torch.nn.functional.pad(x, (radius, radius), value=NEG_INF)
    width = 1
    while 2 * width <= window:
        padded = torch.maximum(padded[..., : padded.shape[-1] - width], padded[..., width:])
        width *= 2
    rest = window - width
    return torch.maximum(padded[..., :size], padded[..., rest : rest + size]) if rest else padded[..., :size]


def refine(log_s: Tensor, candidates: Tensor, spec: SelectorSpec) -> Tensor:
    """Soft non-maximum suppression along the sequence, then exclusivity across KV heads (off for two or fewer)."""
    x = log_s
    radius = min(spec.nms_window // 2, x.shape[-1] - 1)
    if radius and spec.nms_alpha:
        x = x - spec.nms_alpha * (windowed_max(x, radius) - x)
        x = torch.where(candidates, x, NEG_INF)
    if x.shape[0] > 2 and spec.exclusivity_alpha:
        finite = torch.where(candidates, x, 0.0)
        share = torch.log_softmax(finite / spec.exclusivity_temperature, dim=0)
        x = torch.where(candidates, x + spec.exclusivity_alpha * share, NEG_INF)
    return x


def score(logits: Tensor, keys: Tensor, candidates: Tensor, spec: SelectorSpec) -> Tensor:
    """Refined log-score [H, N] float32 of every candidate; -inf elsewhere."""
    log_f = log_evidence(logits, candidates, spec.alpha)
    log_r = log_prior(keys, candidates, spec)
    clip = spec.lambda_clip if logits.shape[1] == 1 else spec.lambda_clip_multi
    return refine(fuse(log_f, log_r, clip), candidates, spec)


def top_k(scores: Tensor, candidates: Tensor, k: int) -> Tensor:
    """Positions [H, k] int64 of the k best candidates, ascending; ties go to the lower position; unused slots are -1.

    `torch.topk` promises nothing about ties, so it only supplies the k-th value; ranks by cumulative sums do the rest.
    """
    heads, size = scores.shape
    threshold = scores.topk(k, dim=-1, sorted=True).values[:, -1:]
    above = (scores > threshold) & candidates
    tied = (scores == threshold) & candidates
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    positions = torch.arange(size, device=scores.device).expand(heads, size)
    out = torch.full((heads, k + 1), -1, dtype=torch.int64, device=scores.device)
    return out.scatter(1, slot, torch.where(chosen, positions, -1))[:, :k]


def select(logits: Tensor, keys: Tensor, candidates: Tensor, spec: SelectorSpec) -> Tensor:
    """The selected positions of one row: int64 [H, min(k_head, N)], ascending, unused slots -1 at the end."""
    k = min(spec.k_head, logits.shape[-1])
    return top_k(score(logits, keys, candidates, spec), candidates, k)
