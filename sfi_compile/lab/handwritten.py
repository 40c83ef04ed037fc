"""Hand-written decoders of the sample: the ways in which people write KV caches and attention by hand. Imports torch.

Caches are buffers, and `forward` takes the positions of its tokens. One block holds a kind of cache (`CACHES`) and a
kind of attention (`ATTENTIONS`); the others hide or restructure attention as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 128
LAYERS = 2
MAX_POSITION = 512

Positions = Tensor | int
"""int64 [new], or the first of them as a Python int."""


def _index(cache: Tensor, where: Any, new: Tensor) -> None:
    cache[:, :, where] = new


def _slice(cache: Tensor, where: Any, new: Tensor) -> None:
    cache[:, :, where : where + new.shape[2]] = new


def _narrow(cache: Tensor, where: Any, new: Tensor) -> None:
    cache.narrow(2, where, new.shape[2]).copy_(new)


def _scatter(cache: Tensor, where: Any, new: Tensor) -> None:
    cache.scatter_(2, where[None, None, :, None].expand_as(new), new)


CACHES: dict[str, Callable[[Tensor, Any, Tensor], None]] = {
    "bhsd": _index, "bshd": _index, "int8": _index, "slice": _slice, "narrow": _narrow, "scatter": _scatter,
}  # fmt: skip
"""How new keys [batch, heads, new, dim] are written; "bshd" keeps heads after the sequence, "int8" quantises."""


class OwnCache(nn.Module):
    """Keys and values of one layer, in one of `CACHES`; "bhsd" is gpt-fast's."""

    def __init__(self, kind: str, batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        shape = (batch, length, heads, dim) if kind == "bshd" else (batch, heads, length, dim)
        for name in ("k", "v"):
            self.register_buffer(f"{name}_cache", torch.zeros(shape, dtype=torch.int8 if kind == "int8" else dtype))
            if kind == "int8":
                self.register_buffer(f"{name}_scale", torch.ones(batch, heads, length, 1, dtype=dtype))

    def update(self, where: Positions, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, new, heads, dim]; both caches as attention reads them, [batch, heads, length, dim]."""
        if self.kind == "bshd":
            keys: Any = self.k_cache
            values: Any = self.v_cache
            keys[:, where], values[:, where] = k, v
            return keys.permute(0, 2, 1, 3), values.transpose(1, 2)
        return self._written("k", where, k.transpose(1, 2)), self._written("v", where, v.transpose(1, 2))

    def _written(self, name: str, where: Positions, new: Tensor) -> Tensor:
        cache: Tensor = getattr(self, f"{name}_cache")
        if self.kind != "int8":
            CACHES[self.kind](cache, where, new)
            return cache
        scales: Tensor = getattr(self, f"{name}_scale")
        scale = new.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        _index(scales, where, scale)
        _index(cache, where, (new / scale).round().to(torch.int8))
        return cache.to(scales.dtype) * scales


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)


def _permuted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores: Tensor = (q @ k.permute(0, 1, 3, 2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.finfo(scores.dtype).max)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).type(scores.dtype)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    batch, heads, new, dim = q.shape
    q = q.view(batch, k.shape[1], heads // k.shape[1], new, dim)
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) / dim**0.5
    weights = torch.softmax(scores.masked_fill(~mask[:, :, None], float("-inf")), dim=-1)
    return torch.matmul(weights, v[:, :, None]).reshape(batch, heads, new, dim)


def _alibi(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device)
    distance = torch.arange(k.shape[2], device=q.device) - positions[:, None]
    bias = (slopes[:, None, None] * distance).to(q.dtype)
    return _sdpa(q, k, v, torch.where(mask, bias, float("-inf")), positions)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": _sdpa, "permuted": _permuted, "einsum": _einsum, "grouped": _grouped, "alibi": _alibi,
}  # fmt: skip
"""(queries [B, H, new, D], keys and values [B, Hkv, N, D], mask bool [1, 1, new, N], positions int64 [new]) →
[B, H, new, D]. "permuted" and "grouped" are softmaxes between matrix products, the latter over 5-D heads
[B, Hkv, group, new, D] that are never repeated; "einsum" is how x-transformers writes it."""


class OwnBlock(nn.Module):
    """Attention of one of `ATTENTIONS` over one of `CACHES`, and a small feed-forward."""

    def __init__(self, dim: int, heads: int, kv_heads: int = 2, cache: str = "bhsd", attention: str = "sdpa") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.cache, self.attend = cache, ATTENTIONS[attention]
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo, self.ff, self.norm = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim), nn.RMSNorm(dim)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        """An empty cache of `length` positions, which the block now uses."""
        self.kv_cache = OwnCache(self.cache, batch, length, self.kv_heads, self.head_dim, self.wo.weight.dtype)
        return self.kv_cache

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, where: Positions) -> Tensor:
        """[batch, new, dim] → the same."""
        batch, new, dim = x.shape
        kv_dim = self.kv_heads * self.head_dim
        q, k, v = self.wqkv(self.norm(x)).split([dim, kv_dim, kv_dim], dim=-1)
        q = q.view(batch, new, self.heads, self.head_dim).transpose(1, 2)
        k, v = (t.view(batch, new, self.kv_heads, self.head_dim) for t in (k, v))
        k, v = self.kv_cache.update(where, k, v)
        y = self.attend(q, k, v, mask, positions)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, new, dim))
        return x + torch.tanh(self.ff(x))


class LatentCache(nn.Module):
    """What multi-head latent attention keeps of a token: a latent vector, and a key that all heads share."""

    def __init__(self, batch: int, length: int, latent: int, shared: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("latents", torch.zeros(batch, length, latent, dtype=dtype))
        self.register_buffer("shared", torch.zeros(batch, length, shared, dtype=dtype))


class LatentBlock(nn.Module):
    """Multi-head latent attention; `absorbed` multiplies queries and outputs instead of expanding cached tokens."""

    def __init__(self, dim: int, heads: int, absorbed: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.latent, self.shared = heads, dim // heads, 16, 8
        self.absorbed = absorbed
        self.wq = nn.Linear(dim, heads * (self.head_dim + self.shared), bias=False)
        self.down = nn.Linear(dim, self.latent + self.shared, bias=False)
        self.up = nn.Linear(self.latent, heads * 2 * self.head_dim, bias=False)
        self.wo, self.norm = nn.Linear(dim, dim, bias=False), nn.RMSNorm(dim)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        """An empty cache of `length` positions, which the block now uses."""
        self.kv_cache = LatentCache(batch, length, self.latent, self.shared, self.wo.weight.dtype)
        return self.kv_cache

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, where: Positions) -> Tensor:
        """[batch, new, dim] → the same."""
        batch, new, dim = x.shape
        q = self.wq(self.norm(x)).view(batch, new, self.heads, -1).transpose(1, 2)
        latents: Any = self.kv_cache.latents
        shared: Any = self.kv_cache.shared
        latents[:, where], shared[:, where] = self.down(self.norm(x)).split([self.latent, self.shared], dim=-1)
        scale = (self.head_dim + self.shared) ** -0.5
        if self.absorbed:
            up_k, up_v = self.up.weight.view(self.heads, 2, self.head_dim, self.latent).unbind(1)
            own, common = q.split([self.head_dim, self.shared], dim=-1)
            q = torch.cat([own @ up_k, common], dim=-1)
            k, v = torch.cat([latents, shared], dim=-1)[:, None], latents[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            y = y @ up_v.transpose(1, 2)
        else:
            k, v = self.up(latents).view(batch, -1, self.heads, 2 * self.head_dim).transpose(1, 2).chunk(2, dim=-1)
            k = torch.cat([k, shared[:, None].expand(-1, self.heads, -1, -1)], dim=-1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, new, dim))
        return x + out


class OpaqueBlock(nn.Module):
    """`nn.MultiheadAttention` over a cache of hidden states."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        """An empty cache of `length` positions, which the block now uses."""
        holder = nn.Module()
        holder.register_buffer("states", torch.zeros(batch, length, self.attention.embed_dim))
        self.kv_cache = holder
        return holder

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, where: Positions) -> Tensor:
        """[batch, new, dim] → the same."""
        states: Any = self.kv_cache.states
        states[:, where] = x
        y: Tensor = self.attention(x, states, states, attn_mask=~mask[0, 0], need_weights=False)[0]
        return x + y


class OwnDecoder(nn.Module):
    """Embedding, blocks, output; `forward` takes the positions of its tokens."""

    def __init__(self, block: Callable[[], nn.Module], dim: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_POSITION, dim)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        """Empty caches of `length` positions, one a layer, which the decoder now uses."""
        self.register_buffer("causal_mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))
        caches: list[Any] = [layer.setup_caches(batch, length) for layer in self.layers]  # type: ignore[operator]
        return nn.ModuleList(caches)

    def forward(self, idx: Tensor, where: Positions) -> Tensor:
        """Token ids int64 [batch, new] → logits [batch, new, vocab]."""
        positions = torch.arange(where, where + idx.shape[1]) if isinstance(where, int) else where
        causal: Any = self.causal_mask
        mask = causal[None, None, positions]
        x = self.embed(idx) + self.place(positions)
        for layer in self.layers:
            x = layer(x, mask, positions, where)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


class History(nn.Module):
    """What a decoder without a KV cache is fed again with every token."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.tokens: Tensor
        self.register_buffer("tokens", torch.zeros(batch, 0, dtype=torch.long))

    def extended(self, tokens: Tensor) -> Tensor:
        """All tokens so far and these, int64 [batch, all]."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        return self.tokens


class CachelessDecoder(nn.Module):
    """nanoGPT's style: every step computes the whole text again, with `is_causal=True`."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_POSITION, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def setup_caches(self, batch: int, length: int) -> nn.Module:
        """The text so far, none."""
        return History(batch)

    def forward(self, idx: Tensor) -> Tensor:
        """Token ids int64 [batch, all] → logits [batch, all, vocab]."""
        batch, length = idx.shape
        x = self.embed(idx) + self.place(torch.arange(length))
        for layer in self.layers:
            q, k, v = layer(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(batch, length, -1)
        return self.output(self.norm(x))  # type: ignore[no-any-return]
