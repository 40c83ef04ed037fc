"""Operators of a fast step, which `lower` replaces by their plain bodies, and dense attention in its one form.

Shapes: B rows, Hq query heads, Hkv KV heads, Q queries, N positions allocated, S memory slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfi_compile.kernels import attention, support
from sfi_compile.ops.registration import fake_of, only_writes, operator


@operator()
def gather(x: Tensor, index: Tensor, layout: str, rows: Tensor | None = None) -> Tensor:
    """Gather a mask along its sequence axis, with named axes.

    Args:
        x: any rank; `layout` names its axes: b(atch) h(ead) q(uery) s(equence), m for batch and head in one, 1 for an
            axis of size one.
        index: int64 [B, H, n] positions for every row and head; -1 reads position 0.
        layout: one letter per axis of `x`.
        rows: int64 [Q]: which entries of axis q to take (None: all).

    Returns:
        [B, H, Q or 1, n].
    """
    batch, heads, _ = index.shape
    indices = []
    for axis, name in enumerate(layout):
        if name == "s":
            indices.append(index.clamp_min(0).unsqueeze(2))
        elif name == "1":
            indices.append(torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=x.device))
        elif name == "q" and rows is not None:
            indices.append(rows.reshape(1, 1, -1, 1))
        elif name == "m":
            indices.append(torch.arange(batch * heads, device=x.device).reshape(batch, heads, 1, 1))
        else:
            place = [-1 if name == letter else 1 for letter in "bhqs"]
            indices.append(torch.arange(x.shape[axis], device=x.device).reshape(place))
    return x[tuple(indices)]


fake_of(gather)(gather)


@operator("held", "mem_k", "mem_v")
def append(
    new_k: Tensor,
    new_v: Tensor,
    position: Tensor,
    refreshed_at: Tensor,
    selected_end: int,
    recent: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Append this step's tokens to every row's recent segment.

    Args:
        new_k: [B, Hkv, Q, Dk].
        new_v: [B, Hkv, Q, Dv].
        position: int64 [Q], ascending.
        refreshed_at: int64 [B], position of each row's last refresh.
        selected_end: first slot of the recent segment (sink + k_head).
        recent: length of the anchored recent segment.
        held: int64 [B, Hkv, S], written.
        mem_k: [B, Hkv, S, Dk], written.
        mem_v: [B, Hkv, S, Dv], written.
    """
    batch, kv_heads, slots = held.shape
    position = position.long()
    slot = support.append_slot(position, refreshed_at.unsqueeze(1), selected_end, recent, slots)
    rows = torch.arange(batch, device=held.device).unsqueeze(1)
    # Two indices with a slice between them: the result's axes are rows, tokens, heads.
    held[rows, :, slot] = position.reshape(1, -1, 1).expand(batch, -1, kv_heads)
    mem_k[rows, :, slot] = new_k.transpose(1, 2)
    mem_v[rows, :, slot] = new_v.transpose(1, 2)


fake_of(append)(only_writes)


@operator("queries")
def remember(q: Tensor, position: Tensor, queries: Tensor) -> None:
    """Keep this step's queries, each in the place of the one that is W tokens older.

    Args:
        q: [B, Hq, Q, Dk].
        position: int64 [Q], ascending; Q <= W.
        queries: [B, Hq, W, Dk], written: that of the token at position p is at p modulo W.
    """
    queries.index_copy_(2, torch.remainder(position.long(), queries.shape[2]), q)


fake_of(remember)(only_writes)


@operator()
def memory_attention(
    q: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
    held: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Attention over the memory (the fast path).

    Args:
        q: [B, Hq, Q, Dk].
        mem_k: [B, Hkv, S, Dk].
        mem_v: [B, Hkv, S, Dv].
        held: int64 [B, Hkv, S]; slots with -1 are not attended to.
        mask: the site's mask at the held positions, bool or float [B, Hkv or Hq, 1 or Q, S].
        scale: factor of the logits.
        softcap: logits x become `softcap * tanh(x / softcap)` before the mask; 0: they do not.
        sinks: [1 or B, 1 or Hq, 1 or Q, C], logits that take weight and give nothing.
        length: int64 [B], one past the last filled slot of each row; later slots are not looked at. None: all are.

    Returns:
        [B, Hq, Q, Dv]; zeros for a query that may attend to nothing.
    """
    kv_heads = mem_k.shape[1]
    full = (held >= 0).unsqueeze(2)
    if length is not None:
        full = full & (torch.arange(held.shape[2], device=held.device) < length.reshape(-1, 1, 1, 1))
    if mask.shape[1] != kv_heads:
        mask = attention.pack_mask(mask, q.shape[1], kv_heads, q.shape[2])
    elif mask.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[1] // kv_heads, 1)
    if mask.dtype == torch.bool:
        mask = mask & full
    else:
        mask = torch.where(full, mask, attention.NEG_INF)
    return attention.over_memory(q, mem_k, mem_v, mask, scale, softcap, sinks)


@fake_of(memory_attention)
def _(q: Tensor, mem_k: Tensor, mem_v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], mem_v.shape[-1])
