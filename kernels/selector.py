"""The training-free selector of Slow-Fast Inference, in plain torch with static shapes, so that Inductor compiles it.

One row of the batch at a time: `logits` [kv_heads, rows, N] float32 (rows = query heads of the group x queries of the
step, -inf where attention is not allowed), `keys` [kv_heads, N, key_dim], `position` [N] from `log_position`. All in
logs, all in float32. Source: arXiv 2603.12038 (Selector) and docs/design.md, "Selector". The oracle is in
`reference.py`; neither imports the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sfi_compile.config import POSITION_BETA, SelectorSpec
from sfi_compile.kernels.support import running_count

NEG_INF = float("-inf")
MIN_NORM = 1e-6
"""Key norms are clamped here, so that an all-zero key has a finite prior."""


def log_evidence(logits: Tensor, candidates: Tensor, alpha: float) -> Tensor:
    """Power mean over the evidence rows of the attention probabilities, in logs: [H, R, N] → [H, N].

    Renormalised over the candidates: its exponentials sum to one (NaN without candidates). A query that may attend to
    nothing, a row of -inf, prefers no token.
    """
    log_p = logits.log_softmax(-1).nan_to_num_(-math.log(logits.shape[-1]), neginf=NEG_INF)
    if alpha:
        # A log-sum-exp by hand: torch's takes twice as long. The division by the number of rows is a constant, which
        # the renormalisation takes out; the bound is for columns in which all are -inf.
        largest = log_p.amax(1, keepdim=True).clamp_min_(torch.finfo(log_p.dtype).min)
        total = log_p.sub_(largest).mul_(alpha).exp_().sum(1).log_()
        mean = torch.add(largest[:, 0], total, alpha=1.0 / alpha)
    else:
        mean = log_p.mean(dim=1)
    return torch.where(candidates, mean, NEG_INF).log_softmax(-1)


def log_position(candidates: Tensor, spec: SelectorSpec) -> Tensor:
    """The prior's term for the place in the window, with its weight: bool [..., N] → float32, -inf off the candidates.

    It is the same for every site of a step; whatever else the selector asks of the candidates, it reads from here.
    """
    count = candidates.sum(-1, keepdim=True).clamp_min(1)
    # Rank among the candidates over their number: u in [0, 1), so log(1 - u) is finite.
    u = (running_count(candidates) - 1).clamp_min_(0) / count
    place = -POSITION_BETA * u.pow(spec.position_power) + spec.position_eta * torch.log1p(-u)
    return torch.where(candidates, spec.position_weight * place, NEG_INF)


def log_prior(keys: Tensor, position: Tensor, spec: SelectorSpec) -> Tensor:
    """Damps large-norm keys and crowding at the end of the window: [H, N, D], `log_position` [N] → [H, N].

    Renormalised over the candidates, like the evidence.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=wide).float().clamp_min_(MIN_NORM)
    prior = torch.add(position, norms.log_(), alpha=-spec.norm_weight * spec.norm_gamma)
    # Other keys may be anything, NaN included.
    return torch.where(position > NEG_INF, prior, NEG_INF).log_softmax(-1)


def fuse(log_f: Tensor, log_r: Tensor, clip: float) -> Tensor:
    """Mix evidence and prior, `s = (1 - λ) f + λ r`, with the λ that minimises ‖s‖², clipped to [0, clip]."""
    both = torch.stack([log_f, log_r], 1).exp_()
    products = (both.unsqueeze(1) * both.unsqueeze(2)).sum(-1)  # not a matmul, which may round to TF32
    ff, fr, rr = products[:, 0, :1], products[:, 0, 1:], products[:, 1, 1:]
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
        x = torch.sub((1.0 + spec.nms_alpha) * x, windowed_max(x, radius), alpha=spec.nms_alpha)
    x = torch.where(candidates, x, NEG_INF)
    if x.shape[0] > 2 and spec.exclusivity_alpha:
        finite = torch.where(candidates, x, 0.0)
        share = torch.log_softmax(finite / spec.exclusivity_temperature, dim=0)
        x = torch.where(candidates, x + spec.exclusivity_alpha * share, NEG_INF)
    return x


def score(logits: Tensor, keys: Tensor, position: Tensor, spec: SelectorSpec) -> Tensor:
    """Refined log-score [H, N] float32 of every candidate; -inf elsewhere. `position` is `log_position`'s."""
    candidates = position > NEG_INF
    log_f = log_evidence(logits, candidates, spec.alpha)
    log_r = log_prior(keys, position, spec)
    clip = spec.lambda_clip if logits.shape[1] == 1 else spec.lambda_clip_multi
    return refine(fuse(log_f, log_r, clip), candidates, spec)


def top_k(scores: Tensor, candidates: Tensor, k: int) -> Tensor:
    """Positions [H, k] int64 of the k best candidates, ascending; ties go to the lower position; unused slots are -1.

    `torch.topk` promises nothing about ties, so it only supplies the k-th value; ranks by cumulative sums do the rest.
    """
    heads, size = scores.shape
    threshold = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > threshold
    tied = (scores == threshold) & candidates
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    # What is not chosen goes to a slot past the end.
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    positions = torch.arange(size, device=scores.device).expand(heads, size)
    out = torch.full((heads, k + 1), -1, dtype=torch.int64, device=scores.device)
    return out.scatter_(1, slot, positions)[:, :k]
