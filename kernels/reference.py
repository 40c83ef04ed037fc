"""The float64 oracle: candidates, selector, support and attention, written down literally from their formulas.

It is slow and plain on purpose, and it is what the optimised kernels are measured against. It imports torch and
`sfi_compile.config` only; no optimised kernel imports it, and it imports none of them. Everything is about one row of
a batch. Sizes: N positions, H KV heads, R evidence rows (query heads of one group x queries), D key width.

Source of the formulas: arXiv 2603.12038 (evidence, prior, fusion, refinement) and docs/design.md, "Selector".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sfi_compile.config import POSITION_BETA, SelectorSpec

NORM_FLOOR = 1e-6
"""Key norms below this count as this, so that a zero key has a finite prior."""


def candidates(allowed: Tensor, position: int, sink: int, recent: int) -> Tensor:
    """Positions that the selector may choose from: allowed, not sink, not in the anchored recent segment.

    Args:
        allowed: bool [N], positions that the row may attend to.
        position: the refresh position.
        sink: how many of the first allowed positions are sinks.
        recent: length in positions of the recent segment [position - recent + 1 .. position].

    Returns:
        bool [N].
    """
    chosen = torch.zeros_like(allowed)
    seen = 0
    for t in range(allowed.shape[0]):
        if not allowed[t]:
            continue
        seen += 1
        chosen[t] = seen > sink and t <= position - recent
    return chosen


def _renormalised(log_x: Tensor, cand: Tensor) -> Tensor:
    """`log_x` shifted so that its exponentials sum to 1 over the candidates; -inf elsewhere."""
    inside = log_x.masked_fill(~cand, -math.inf)
    return inside - torch.logsumexp(inside, dim=-1) if cand.any() else inside


def log_evidence(logits: Tensor, allowed: Tensor, cand: Tensor, alpha: float) -> Tensor:
    """Log of the evidence f: the power mean, over rows, of the site's own attention probabilities.

    `log f(t) = (1/alpha) * (logsumexp_r(alpha * log p_r(t)) - log R)`, and the mean of logs when alpha is 0; p_r is the
    softmax over the allowed positions; f is then renormalised over the candidates.

    Args:
        logits: [R, N], finite at every candidate; values at positions not allowed are ignored.
        allowed: bool [N].
        cand: bool [N], a subset of `allowed`.
        alpha: exponent of the power mean, >= 0.

    Returns:
        float64 [N], -inf off the candidates.
    """
    if not cand.any():
        return torch.full(cand.shape, -math.inf, dtype=torch.float64)
    masked = logits.double().masked_fill(~allowed, -math.inf)
    log_p = masked - torch.logsumexp(masked, dim=-1, keepdim=True)
    if alpha == 0:
        log_f = log_p.mean(dim=0)
    else:
        log_f = (torch.logsumexp(alpha * log_p, dim=0) - math.log(logits.shape[0])) / alpha
    return _renormalised(log_f, cand)


def log_prior(keys: Tensor, cand: Tensor, spec: SelectorSpec) -> Tensor:
    """Log of the prior r, which damps keys of large norm and crowding at the end of the window.

    `log r(t) = w_n * (-gamma * log|k_t|) + w_p * (-beta * u^pi + eta * log(1 - u))`, renormalised over the candidates.
    u is a candidate's rank among the candidates, from 0, over their number; |k| is at least `NORM_FLOOR`.

    Args:
        keys: [N, D], the keys of one KV head; values off the candidates are ignored.
        cand: bool [N].
        spec: the weights and exponents.

    Returns:
        float64 [N], -inf off the candidates.
    """
    log_r = torch.full(cand.shape, -math.inf, dtype=torch.float64)
    chosen = cand.nonzero().flatten().tolist()
    for rank, t in enumerate(chosen):
        u = rank / len(chosen)
        norm = max(math.hypot(*keys[t].double().tolist()), NORM_FLOOR)
        by_norm = -spec.norm_gamma * math.log(norm)
        by_position = -POSITION_BETA * u**spec.position_power + spec.position_eta * math.log(1 - u)
        log_r[t] = spec.norm_weight * by_norm + spec.position_weight * by_position
    return _renormalised(log_r, cand)


def fuse(log_f: Tensor, log_r: Tensor, clip: float) -> tuple[Tensor, float]:
    """Blend evidence and prior: `s = (1 - lambda) * f + lambda * r`, lambda minimising |s|^2 within [0, clip].

    `lambda* = (<f,f> - <f,r>) / (<f,f> - 2<f,r> + <r,r>)`, computed as `<f, f-r> / |f-r|^2`, which is the same and does
    not cancel; it is 0 when f equals r.

    Args:
        log_f: [N], log evidence.
        log_r: [N], log prior.
        clip: the largest lambda, within 0..1.

    Returns:
        log s, float64 [N]; and lambda.
    """
    log_f, log_r = log_f.double(), log_r.double()
    f, r = log_f.exp(), log_r.exp()
    distance = float(((f - r) ** 2).sum())
    best = float((f * (f - r)).sum()) / distance if distance > 0 else 0.0
    lam = min(max(best, 0.0), clip)
    if lam == 0:
        return log_f, 0.0
    if lam == 1:
        return log_r, 1.0
    return torch.logaddexp(math.log1p(-lam) + log_f, math.log(lam) + log_r), lam


def refine(log_s: Tensor, cand: Tensor, spec: SelectorSpec) -> Tensor:
    """Soft non-maximum suppression along the positions, then exclusivity across KV heads.

    `x <- x - nms_alpha * (max_{|i-t| <= nms_window//2} x_i - x_t)` over candidates i; then, with more than two heads,
    `x_h <- x_h + exclusivity_alpha * log softmax_h(x / temperature)_h`.

    Args:
        log_s: [H, N], finite at every candidate.
        cand: bool [N].
        spec: strengths, window and temperature.

    Returns:
        float64 [H, N], the refined score; -inf off the candidates.
    """
    x = log_s.double().masked_fill(~cand, -math.inf)
    heads, positions = x.shape
    radius = spec.nms_window // 2
    suppressed = torch.full_like(x, -math.inf)
    for t in range(positions):
        if cand[t]:
            peak = x[:, max(t - radius, 0) : t + radius + 1].amax(dim=-1)
            suppressed[:, t] = x[:, t] - spec.nms_alpha * (peak - x[:, t])
    if heads <= 2:
        return suppressed
    exclusive = suppressed.clone()
    for t in range(positions):
        if cand[t]:
            shares = torch.log_softmax(suppressed[:, t] / spec.exclusivity_temperature, dim=0)
            exclusive[:, t] += spec.exclusivity_alpha * shares
    return exclusive


def score(logits: Tensor, keys: Tensor, allowed: Tensor, cand: Tensor, spec: SelectorSpec) -> Tensor:
    """The refined score of every position: evidence, prior, fusion and refinement in turn.

    Args:
        logits: [H, R, N], finite at every candidate.
        keys: [H, N, D].
        allowed: bool [N].
        cand: bool [N], a subset of `allowed`.
        spec: the selector's numbers. Lambda is clipped at `lambda_clip` for one evidence row, else at
            `lambda_clip_multi`.

    Returns:
        float64 [H, N], -inf off the candidates.
    """
    heads, rows, _ = logits.shape
    clip = spec.lambda_clip if rows == 1 else spec.lambda_clip_multi
    blended = []
    for h in range(heads):
        log_f = log_evidence(logits[h], allowed, cand, spec.alpha)
        log_r = log_prior(keys[h], cand, spec)
        blended.append(fuse(log_f, log_r, clip)[0])
    return refine(torch.stack(blended), cand, spec)


def attended(history: Tensor, logits: Tensor, allowed: Tensor, left: float) -> Tensor:
    """A history after one more slow step: what is left of it, and the attention of all rows.

    `h(t) <- left * h(t) + sum_r p_r(t)`; p_r is the softmax over the allowed positions. A row whose logits are all -inf
    adds nothing.

    Args:
        history: [N].
        logits: [R, N], -inf where masked; values at positions not allowed are ignored.
        allowed: bool [N].
        left: share of the history that is left.

    Returns:
        float64 [N].
    """
    found = left * history.double()
    for row in logits.double():
        inside = row.masked_fill(~allowed, -math.inf)
        if (inside > -math.inf).any():
            found = found + torch.softmax(inside, dim=0)
    return found


def carried(f: Tensor, weight: float, ahead: int, decay: float) -> Tensor:
    """`f(t) + weight * max over 0 <= e <= ahead of decay^e * f(t - e)`, float64 [N], of positions from the first."""
    values = f.double().tolist()
    found = [x + weight * max(decay**e * values[t - e] for e in range(min(ahead, t) + 1)) for t, x in enumerate(values)]
    return torch.tensor(found, dtype=torch.float64)


def best(scores: Tensor, cand: Tensor, k: int) -> list[int]:
    """The k candidates of the highest score, ties to the lower position, ascending; fewer if there are fewer.

    Args:
        scores: [N].
        cand: bool [N].
        k: how many to choose, >= 0.
    """
    values = scores.tolist()
    ranked = sorted(cand.nonzero().flatten().tolist(), key=lambda t: (-values[t], t))
    return sorted(ranked[:k])


def select(logits: Tensor, keys: Tensor, allowed: Tensor, position: int, spec: SelectorSpec) -> list[list[int]]:
    """The selected positions of each KV head at a refresh.

    Args:
        logits: [H, R, N], the site's own logits.
        keys: [H, N, D].
        allowed: bool [N].
        position: the refresh position.
        spec: the selector's numbers.

    Returns:
        H ascending lists of at most `k_head` positions.
    """
    cand = candidates(allowed, position, spec.sink, spec.recent)
    scores = score(logits, keys, allowed, cand, spec)
    return [best(of_head, cand, spec.k_head) for of_head in scores]


def support(allowed: Tensor, position: int, selected: list[list[int]], spec: SelectorSpec) -> list[list[int]]:
    """The positions that a fast step attends to right after a refresh: sink, selected and recent.

    Args:
        allowed: bool [N], none after `position`.
        position: the refresh position; its token is held even if its own query may not attend to it, as later ones may.
        selected: one list of positions per KV head.
        spec: `sink` and `recent` are read.

    Returns:
        One ascending list of distinct positions per KV head.
    """
    every = allowed.nonzero().flatten().tolist()
    sinks = every[: spec.sink]
    recents = [position, *(t for t in every if position - spec.recent < t <= position)]
    return [sorted({*sinks, *of_head, *recents}) for of_head in selected]


def _masked_logits(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """float64 [Hq, Q, N]; query head h reads KV head h // (Hq // Hkv)."""
    heads, kv_heads = q.shape[0], k.shape[0]
    if heads % kv_heads != 0:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads; allowed: a multiple of the KV heads")
    group = heads // kv_heads
    raw = torch.stack([q[h].double() @ k[h // group].double().T for h in range(heads)]) * scale
    if softcap is not None:
        raw = softcap * torch.tanh(raw / softcap)
    if mask is None:
        return raw
    if mask.dtype == torch.bool:
        return raw.masked_fill(~mask.expand(raw.shape), -math.inf)
    return raw + mask.double()


def logits(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None) -> Tensor:
    """A site's own logits, arranged as evidence rows.

    Args:
        q: [Hq, Q, D].
        k: [Hkv, N, D].
        mask: None, bool (True: may attend) or float (added), broadcastable to [Hq, Q, N].
        scale: factor of the dot products.
        softcap: if given, logits x become `softcap * tanh(x / softcap)` before the mask.

    Returns:
        float64 [Hkv, Hq // Hkv * Q, N], -inf where masked; rows run over the query heads of the group, then over the
        queries of each.

    Raises:
        ValueError: Hq is not a multiple of Hkv.
    """
    every = _masked_logits(q, k, mask, scale, softcap)
    return every.reshape(k.shape[0], -1, k.shape[1])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    positions: list[list[int]] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of one row, over everything that the mask allows or over given positions only.

    Args:
        q: [Hq, Q, D].
        k: [Hkv, N, D].
        v: [Hkv, N, Dv].
        mask: None, bool (True: may attend) or float (added), broadcastable to [Hq, Q, N].
        scale: factor of the dot products.
        positions: per KV head, the only positions to attend to (the mask still holds); None: all.
        softcap: see `logits`.
        sinks: None, or [Hq, C], logits beside those of the positions: they take weight and give nothing.

    Returns:
        float64 [Hq, Q, Dv]; zeros for a query that may attend to nothing.

    Raises:
        ValueError: Hq is not a multiple of Hkv.
    """
    every = _masked_logits(q, k, mask, scale, softcap)
    group = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for h in range(q.shape[0]):
        kept = list(range(k.shape[1])) if positions is None else positions[h // group]
        values = v[h // group, kept].double()
        for i in range(q.shape[1]):
            row = every[h, i, kept]
            if (row > -math.inf).any():
                beside = row if sinks is None else torch.cat([row, sinks[h].double()])
                out[h, i] = torch.softmax(beside, dim=0)[: len(row)] @ values
    return out
