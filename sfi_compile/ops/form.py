"""Attention in its one form: what every way of writing it is brought to before the passes look at it.

Shapes: B rows, Hq query heads, Hkv KV heads, Q queries, N positions allocated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sfi_compile.kernels import attention as kernels
from sfi_compile.ops.registration import fake_of, operator


@operator()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """Dense attention of all rows.

    Args:
        q: [B, Hq, Q, Dk].
        k: [B, Hkv, N, Dk]; query head h reads KV head h // (Hq / Hkv).
        v: [B, Hkv, N, Dv].
        mask: bool (True: may attend) or float (added to the logits), broadcastable to [B, Hq, Q, N].
        scale: factor of the logits.
        softcap: logits x become `softcap * tanh(x / softcap)` before the mask; 0: they do not.
        sinks: [1 or B, 1 or Hq, 1 or Q, C], logits that take weight and give nothing.
        fill: what logits become that the mask blocks with False or -inf, a float that broadcasts to [B, Hq, Q, N].
            None: they have no weight, and a query that may attend to nothing gets zeros.

    Returns:
        [B, Hq, Q, Dv].
    """
    sizes = q.shape[1], k.shape[1], q.shape[2]
    filled = None if fill is None else kernels.pack_mask(fill, *sizes)
    return kernels.over_memory(q, k, v, kernels.pack_mask(mask, *sizes), scale, softcap, sinks, filled)


@fake_of(attention)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])
