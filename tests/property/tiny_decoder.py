"""A decoder small enough to be restated in full, and its compiled forms.

Graphs are lowered to plain Python here (`eager_lowering`): what is tested is which step runs on which memory, not what
Inductor makes of it, and no C++ is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sfi_compile import backend
from sfi_compile.config import Config
from sfi_compile.runtime import DecodeRunner

VOCAB = 11
BOUNDARIES = (0, 1, 2)
SIZE = 40
"""Positions of every cache."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A decoder's shape, and the options it is compiled with."""

    layers: int = 2
    kv_heads: int = 2
    group: int = 2
    dim: int = 8
    rotary: bool = True
    k_head: int = 4
    sink: int = 1
    recent: int = 3
    refresh_interval: int = 5
    min_refresh_gap: int = 2
    sentence_cooldown: int = 2
    min_context: int = 0
    strict: bool = True

    @property
    def config(self) -> Config:
        names = [f.name for f in dataclasses.fields(Config)]
        options = {k: v for k, v in dataclasses.asdict(self).items() if k in names}
        return Config.from_options({**options, "boundary_token_ids": BOUNDARIES, "nms_window": 4})

    @property
    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config)


SMALL = Variant()
NOT_STRICT = Variant(strict=False)
MANY_HEADS = Variant(kv_heads=3, group=1, rotary=False, k_head=2, sink=0, recent=1, refresh_interval=4)
FULL = Variant(k_head=SIZE, sink=2, recent=4, refresh_interval=6, min_context=7)
ONE_LAYER = Variant(
    layers=1, kv_heads=1, group=3, dim=6, refresh_interval=9, min_refresh_gap=0, sentence_cooldown=1, min_context=3
)
DEEP = Variant(layers=3, group=1, refresh_interval=7, sentence_cooldown=4)
ALWAYS_SLOW = Variant(refresh_interval=1, group=5)
VARIANTS = {
    "small": SMALL,
    "many heads": MANY_HEADS,
    "full": FULL,
    "one layer": ONE_LAYER,
    "deep": DEEP,
    "always slow": ALWAYS_SLOW,
}


class Layer(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        heads, width = variant.kv_heads * variant.group, variant.kv_heads * variant.group * variant.dim
        self.q = nn.Linear(width, heads * variant.dim, bias=False)
        self.k = nn.Linear(width, variant.kv_heads * variant.dim, bias=False)
        self.v = nn.Linear(width, variant.kv_heads * variant.dim, bias=False)
        self.o = nn.Linear(heads * variant.dim, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, H, T, D], positions [B, T]."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half) / half)
    angle = (positions[:, None, :, None] * frequency).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class TinyDecoder(nn.Module):
    """Pre-norm decoder over preallocated caches, with grouped heads, left padding, rotary or learned positions."""

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        super().__init__()
        self.variant = variant
        width = variant.kv_heads * variant.group * variant.dim
        self.embed = nn.Embedding(VOCAB, width)
        self.places = nn.Embedding(SIZE, width)
        self.layers = nn.ModuleList(Layer(variant) for _ in range(variant.layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.seed(seed)
        self.eval().requires_grad_(False)

    def blocks(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def seed(self, seed: int) -> None:
        """New weights in the same tensors, large enough for attention to be peaked."""
        g = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            gain = 2.0 * parameter.shape[-1] ** -0.5 if parameter.shape[0] not in (VOCAB, SIZE) else 1.0
            parameter.data.copy_(gain * torch.randn(parameter.shape, generator=g))

    def forward(
        self, tokens: Tensor, keys: list[Tensor], values: list[Tensor], position: Tensor, start: Tensor
    ) -> Tensor:
        """One step or a prompt: logits [B, T, VOCAB].

        Args:
            tokens: int64 [B, T].
            keys: per layer [B, Hkv, SIZE, D], written at `position`.
            values: like keys.
            position: int64 [T], cache slots of the tokens.
            start: int64 [B], first slot of each row that is no padding.
        """
        v = self.variant
        batch, count = tokens.shape
        places = (position - start[:, None]).clamp_min(0)
        x = self.embed(tokens)
        if not v.rotary:
            x = x + self.places(places)
        slot = torch.arange(SIZE)
        mask = (slot <= position[:, None]) & (slot >= start[:, None, None, None])
        for layer, key, value in zip(self.blocks(), keys, values, strict=True):
            h = rms(x)
            q = layer.q(h).view(batch, count, -1, v.dim).transpose(1, 2)
            k = layer.k(h).view(batch, count, -1, v.dim).transpose(1, 2)
            if v.rotary:
                q, k = rotate(q, places), rotate(k, places)
            key.index_copy_(2, position, k)
            value.index_copy_(2, position, layer.v(h).view(batch, count, -1, v.dim).transpose(1, 2))
            out = nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True)
            x = x + layer.o(out.transpose(1, 2).reshape(batch, count, -1))
            x = x + layer.down(torch.tanh(layer.up(rms(x))))
        logits: Tensor = self.head(rms(x))
        return logits


class Recorder(DecodeRunner):
    """Says which compiled decode graph ran last."""

    last: ClassVar[DecodeRunner | None] = None

    @classmethod
    def forget(cls) -> None:
        cls.last = None

    def __call__(self, *args: Any) -> Any:
        out = super().__call__(*args)
        Recorder.last = self
        return out


@contextmanager
def eager_lowering() -> Iterator[None]:
    """Run the rewritten graphs as Python."""
    limits = torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024)
    with pytest.MonkeyPatch.context() as patch, limits:
        patch.setattr(backend, "compile_graph", lambda gm, inputs, patches, tag="": gm)
        patch.setattr(backend, "DecodeRunner", Recorder)
        yield


@functools.cache
def compiled(variant: Variant) -> tuple[TinyDecoder, Callable[..., Tensor]]:
    """The decoder of a variant and its compiled form; one per process, so that no graph is compiled twice."""
    model = TinyDecoder(variant)
    return model, torch.compile(model, backend="sfi", dynamic=False, options=variant.options)
