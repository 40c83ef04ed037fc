"""Hand-written decoders of the sample database: gpt-fast's style of caches, and attention that hides.

Caches are buffers, the mask is a row of a causal table, and positions are an input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCAB = 128
LAYERS = 2
MAX_POSITION = 512


class OwnCache(nn.Module):
    """Keys and values of one layer, kept as gpt-fast keeps them (bhsd), or with heads after the sequence (bshd)."""

    def __init__(self, layout: str, batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        shape = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype))
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, new, heads, dim]; both caches, [batch, heads, length, dim]."""
        if self.layout == "bhsd":
            k_out, v_out = self.k_cache, self.v_cache
            k_out[:, :, input_pos] = k.transpose(1, 2)
            v_out[:, :, input_pos] = v.transpose(1, 2)
            return k_out, v_out
        self.k_cache[:, input_pos] = k
        self.v_cache[:, input_pos] = v
        return self.k_cache.permute(0, 2, 1, 3), self.v_cache.transpose(1, 2)


class OwnBlock(nn.Module):
    """Attention and a small feed-forward. `attention`: "sdpa", or "permuted" for a softmax over `q @ k.permute(…)`."""

    def __init__(self, dim: int, heads: int, kv_heads: int, layout: str, attention: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.layout, self.attention = layout, attention
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo, self.ff, self.norm = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim), nn.RMSNorm(dim)

    def setup_caches(self, batch: int, length: int) -> OwnCache:
        self.kv_cache = OwnCache(self.layout, batch, length, self.kv_heads, self.head_dim, self.wo.weight.dtype)
        return self.kv_cache

    def forward(self, x: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        batch, length, dim = x.shape
        kv_dim = self.kv_heads * self.head_dim
        q, k, v = self.wqkv(self.norm(x)).split([dim, kv_dim, kv_dim], dim=-1)
        q = q.view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k, v = (t.view(batch, length, self.kv_heads, self.head_dim) for t in (k, v))
        k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        if self.attention == "sdpa":
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        else:
            scores = (q @ k.permute(0, 1, 3, 2)) * self.head_dim**-0.5
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.wo(y.transpose(1, 2).reshape(batch, length, dim))
        return x + torch.tanh(self.ff(x))


class OpaqueBlock(nn.Module):
    """`nn.MultiheadAttention` over a cache of hidden states."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        holder = nn.Module()
        holder.register_buffer("states", torch.zeros(batch, length, self.attention.embed_dim))
        self.kv_cache = holder
        return holder

    def forward(self, x: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        states = self.kv_cache.states
        states[:, input_pos] = x
        return x + self.attention(x, states, states, attn_mask=~mask[0, 0], need_weights=False)[0]


class OwnDecoder(nn.Module):
    """Embedding, blocks, output; `forward` takes the positions of its tokens."""

    def __init__(self, block: Callable[[], nn.Module], dim: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_POSITION, dim)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def setup_caches(self, batch: int, length: int) -> nn.ModuleList:
        self.register_buffer("causal_mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))
        return nn.ModuleList(layer.setup_caches(batch, length) for layer in self.layers)

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        mask = self.causal_mask[None, None, input_pos]
        x = self.embed(idx) + self.place(input_pos)
        for layer in self.layers:
            x = layer(x, mask, input_pos)
        return self.output(self.norm(x))
