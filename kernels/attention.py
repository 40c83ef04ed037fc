"""Attention as plain torch: dense over flagged rows with its logits as a by-product, and over the packed memory.

Queries are packed by KV head, so head repetition is never materialised: a site's [B, Hq, Q, D] queries are read as
[B, Hkv, G*Q, D] (rows ordered query head of the group first, then query). Imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")
BLOCKED = 5000.0
"""A bias this far below the largest of its row blocks: no logits are large enough to make up for it."""


def pack_queries(q: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, Q, D] → [B, Hkv, G*Q, D]."""
    batch, heads, queries, dim = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads * queries, dim)


def unpack_queries(out: Tensor, query_heads: int) -> Tensor:
    """[B, Hkv, G*Q, D] → [B, Hq, Q, D]."""
    batch, kv_heads, rows, dim = out.shape
    return out.reshape(batch, query_heads, rows * kv_heads // query_heads, dim)


def pack_mask(mask: Tensor, query_heads: int, kv_heads: int, query_len: int) -> Tensor:
    """A mask that broadcasts to [B, Hq, Q, N], as one that broadcasts to [B, Hkv, G*Q, N]."""
    batch, heads, queries, size = mask.shape
    if heads == 1 and queries == 1:
        return mask
    group = query_heads // kv_heads
    if heads == 1:
        return mask.expand(batch, group, queries, size).reshape(batch, 1, group * queries, size)
    return mask.expand(batch, query_heads, query_len, size).reshape(batch, kv_heads, group * query_len, size)


def apply_mask(logits: Tensor, mask: Tensor, fill: Tensor | None = None) -> Tensor:
    """Bool: False becomes -inf. Float: added, in the wider of both types. With `fill`, -inf becomes that instead."""
    filled = NEG_INF if fill is None else fill.to(logits.dtype)
    if mask.dtype == torch.bool:
        return torch.where(mask, logits, filled)
    return logits + mask if fill is None else torch.where(mask == NEG_INF, filled, logits + mask)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """`softcap * tanh(logits / softcap)`; 0 means no cap."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def pack_sinks(sinks: Tensor, query_heads: int, kv_heads: int, query_len: int) -> Tensor:
    """Sink logits [1 or B, 1 or Hq, 1 or Q, C], as [1 or B, Hkv, G*Q, C]."""
    batch, _, _, columns = sinks.shape
    return sinks.expand(batch, query_heads, query_len, columns).reshape(batch, kv_heads, -1, columns)


def weights_of(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the tokens and the sink columns [..., C] beside them; only the tokens' weights are returned."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    columns = sinks.to(logits.dtype).expand(*logits.shape[:-1], -1)
    return torch.softmax(torch.cat([logits, columns], dim=-1), dim=-1)[..., : logits.shape[-1]]


def may_attend(mask: Tensor) -> Tensor:
    """Where a mask lets anything through.

    A float mask blocks with -inf, its dtype's minimum, -1e9 or -1e4: whatever is so far below the largest of its row
    that its weight is zero. So where all of a row has one such number, other than -inf, nothing is blocked.
    """
    if mask.dtype == torch.bool:
        return mask
    wide = mask.double()
    return wide - wide.amax(-1, keepdim=True) > -BLOCKED


def sees_any(mask: Tensor, fill: Tensor | float) -> Tensor:
    """Whether a query may attend to anything: bool [..., 1] of a mask [..., N].

    Something must be let through, and so much better than the blocked logits, which become `fill`, that these have no
    weight beside it.
    """
    if mask.dtype == torch.bool:
        return mask.any(-1, keepdim=True)
    best = mask.amax(-1, keepdim=True).double()
    blocked = fill.amax(-1, keepdim=True).double() if isinstance(fill, Tensor) else fill
    return (best > NEG_INF) & (best - blocked > BLOCKED - 1)


def over_memory(
    q: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """Attention over the packed memory.

    Args:
        q: [B, Hq, Q, Dk].
        mem_k: [B, Hkv, S, Dk].
        mem_v: [B, Hkv, S, Dv].
        mask: [B, Hkv, 1 or G*Q, S], bool or float.
        scale: factor of the logits.
        softcap: see `capped`.
        sinks: [1 or B, 1 or Hq, 1 or Q, C], logits that take weight and give nothing.
        fill: what blocked logits become, a float that broadcasts to [B, Hkv, G*Q, S]. None: they have no weight, and a
            query that may attend to nothing gets zeros.

    Returns:
        [B, Hq, Q, Dv] in q's dtype; logits and softmax in float32 (float64 for float64).
    """
    # Logits that were rounded to a half-width dtype first would lose several times what eager attention loses.
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = pack_queries(q, mem_k.shape[1]).to(wide)
    logits = capped(torch.matmul(packed, mem_k.to(wide).transpose(-1, -2)) * scale, softcap)
    columns = None if sinks is None else pack_sinks(sinks, q.shape[1], mem_k.shape[1], q.shape[2])
    masked = apply_mask(logits, mask, fill)
    weights = weights_of(masked, columns)
    if fill is None:
        # A head may be allowed nothing: zeros, as in `dense_row`, not 0/0.
        weights = weights.masked_fill(masked.amax(-1, keepdim=True) == NEG_INF, 0.0)
    return unpack_queries(torch.matmul(weights.to(mem_v.dtype), mem_v), q.shape[1])


def row_logits(q: Tensor, k: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Logits of one row before the mask, float32 (float64 for float64): [Hkv, R, Dk], [Hkv, N, Dk] → [Hkv, R, N]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scaled = q.to(wide) * scale
    if q.dtype == wide:
        logits = torch.matmul(scaled, k.transpose(-1, -2))
    else:
        # One head at a time: the float32 copy of the keys is then one head's, not the cache's.
        logits = torch.stack([scaled[h] @ k[h].to(wide).T for h in range(k.shape[0])])
    return capped(logits, softcap)


def dense_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fill: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of one row.

    Args:
        q: [Hkv, G*Q, Dk].
        k: [Hkv, N, Dk].
        v: [Hkv, N, Dv].
        mask: [1 or Hkv, 1 or G*Q, N]; None: everything is attended to.
        scale: factor of the logits.
        softcap: see `capped`.
        sinks: [Hkv, G*Q, C], logits that take weight and give nothing.
        fill: [1 or Hkv, 1 or G*Q, 1 or N], what blocked logits become. None: they have no weight, and a query that may
            attend to nothing gets zeros.

    Returns:
        output [Hkv, G*Q, Dv] in q's dtype, and the masked logits [Hkv, G*Q, N], float32 (float64 for float64), -inf
        where they have no weight.
    """
    logits = row_logits(q, k, scale, softcap)
    if mask is not None:
        logits = apply_mask(logits, mask, fill)
    weights = weights_of(logits, sinks)
    if mask is not None and fill is None:
        # As in scaled_dot_product_attention, a query that may attend to nothing gets zeros, not 0/0.
        nothing = logits.amax(-1, keepdim=True) == NEG_INF
        weights = weights.masked_fill_(nothing, 0.0)
    return torch.matmul(weights.to(v.dtype), v), logits
