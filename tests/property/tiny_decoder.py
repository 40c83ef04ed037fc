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

from sfi_compile import backend, policies
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
    form: str = "sdpa"
    """How attention is written: "sdpa", "eager", "einsum", "bmm", "grouped" (a group's heads on their own axis)."""
    write: str = "index_copy"
    """How the cache is written: "index_copy", "setitem", "scatter" (one token; several as index_copy)."""
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    policy: str = "reach"
    budgets: tuple[int, ...] = ()
    """Tokens chosen in each layer, where they are not `k_head` in all."""
    k_head: int = 4
    sink: int = 1
    recent: int = 3
    refresh_interval: int = 5
    min_refresh_gap: int = 2
    sentence_cooldown: int = 2
    min_context: int = 0
    strict: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> Config:
        return Config.from_options(self.options)

    @property
    def options(self) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(Config)]
        given = {k: v for k, v in dataclasses.asdict(self).items() if k in names}
        of_the_papers_selector = {"nms_window": 4} if policies.parse(self.policy).name == "sfi" else {}
        return {**given, "boundary_token_ids": BOUNDARIES, **of_the_papers_selector}


def papers(variant: Variant) -> Variant:
    """The same under the paper's selector."""
    return dataclasses.replace(variant, policy="sfi")


SMALL = Variant()
NOT_STRICT = Variant(strict=False)
MANY_HEADS = Variant(kv_heads=3, group=1, rotary=False, k_head=2, sink=0, recent=1, refresh_interval=4)
FULL = Variant(k_head=SIZE, sink=2, recent=4, refresh_interval=6, min_context=7)
ONE_LAYER = Variant(
    layers=1, kv_heads=1, group=3, dim=6, refresh_interval=9, min_refresh_gap=0, sentence_cooldown=1, min_context=3
)
CAPPED = Variant(form="eager", write="setitem", softcap=1.5, group=3)
SINKS = Variant(form="grouped", write="scatter", sinks=True, kv_heads=2, recent=4)
ALIBI = Variant(form="bmm", alibi=True, rotary=False, group=1, kv_heads=4)
ALIBI_MASK = Variant(form="sdpa", write="setitem", alibi=True, rotary=False, group=2, kv_heads=1)
EINSUM = Variant(form="einsum", write="scatter", sinks=True, softcap=2.0, alibi=True, kv_heads=3, k_head=3)
DEEP = Variant(layers=3, group=1, refresh_interval=7, sentence_cooldown=4)
ALWAYS_SLOW = Variant(refresh_interval=1, group=5)
FADING = Variant(policy="reach(fading=0.6,weight=2.0,ahead=2,decay=0.5)", min_context=8, kv_heads=3, group=1)
H2O = Variant(policy="h2o(decay=0.75)", min_context=8, layers=3)
FULL_H2O = dataclasses.replace(FULL, policy="h2o")
PYRAMID = Variant(policy="pyramidkv(queries=1,pool=3,beta=3.0)", layers=3, budgets=(7, 4, 1))
FULL_PYRAMID = dataclasses.replace(FULL, policy="pyramidkv")
EXACT = Variant(dtype=torch.float64)
EXACT_EAGER = Variant(dtype=torch.float64, form="eager", softcap=1.5, sinks=True, group=3, policy="sfi")
SHAPES = {
    "small": SMALL,
    "many heads": MANY_HEADS,
    "full": FULL,
    "one layer": ONE_LAYER,
    "deep": DEEP,
    "softcap": CAPPED,
    "sinks": SINKS,
    "alibi": ALIBI,
    "alibi in the mask": ALIBI_MASK,
    "all of them": EINSUM,
}
"""These under the default policy and under the paper's selector."""
VARIANTS = {
    **SHAPES,
    **{f"{name}, paper's": papers(variant) for name, variant in SHAPES.items()},
    "always slow": ALWAYS_SLOW,
    "fading": FADING,
    "history": H2O,
    "budgets by layer": PYRAMID,
    "float64": EXACT,
    "float64, eager, paper's": EXACT_EAGER,
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
        self.sinks = nn.Parameter(torch.zeros(heads, 2)) if variant.sinks else None


def write(how: str, cache: Tensor, position: Tensor, new: Tensor) -> None:
    """Write [B, H, T, D] at `position` [T] of [B, H, SIZE, D]."""
    if how == "setitem":
        cache[:, :, position] = new
    elif how == "scatter" and new.shape[2] == 1:
        cache.scatter_(2, position.view(1, 1, 1, 1).expand(new.shape), new)
    else:
        cache.index_copy_(2, position, new)


def slopes(heads: int) -> Tensor:
    """ALiBi's, large enough to matter in short texts."""
    return 2.0 ** -(torch.arange(heads) + 1.0)


def attend(v: Variant, q: Tensor, key: Tensor, value: Tensor, mask: Tensor, distance: Tensor, layer: Layer) -> Tensor:
    """Attention [B, Hq, T, D] in the variant's way.

    Args:
        v: form, softcap, sinks, alibi.
        q: [B, Hq, T, D].
        key: [B, Hkv, SIZE, D].
        value: like key.
        mask: bool [B, 1, T, SIZE].
        distance: [T, SIZE], slot - position.
        layer: where the sinks are.
    """
    batch, heads, count, dim = q.shape
    bias = slopes(heads).to(q.dtype)[None, :, None, None] * distance if v.alibi else None
    if v.form == "sdpa":
        full = mask if bias is None else torch.where(mask, bias, float("-inf"))
        return nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=full, enable_gqa=True)
    if v.form == "grouped":
        grouped = q.view(batch, v.kv_heads, v.group, count, dim)
        scores = (grouped @ key[:, :, None].transpose(-1, -2)).view(batch, heads, count, SIZE)
    else:
        k = key.repeat_interleave(v.group, dim=1)
        if v.form == "bmm":
            flat = torch.bmm(q.reshape(-1, count, dim), k.reshape(-1, SIZE, dim).transpose(1, 2))
            scores = flat.view(batch, heads, count, SIZE)
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k) if v.form == "einsum" else q @ k.mT
    scores = scores * dim**-0.5
    if v.softcap:
        scores = v.softcap * torch.tanh(scores / v.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -1e9)
    if layer.sinks is not None:
        columns = layer.sinks[None, :, None].expand(batch, -1, count, -1)
        weights = torch.cat([scores, columns], dim=-1).softmax(-1)[..., :SIZE]
    else:
        weights = scores.softmax(-1)
    if v.form == "grouped":
        out = weights.view(batch, v.kv_heads, v.group, count, SIZE) @ value[:, :, None]
        return out.view(batch, heads, count, dim)
    repeated = value.repeat_interleave(v.group, dim=1)
    if v.form == "bmm":
        return torch.bmm(weights.view(-1, count, SIZE), repeated.reshape(-1, SIZE, dim)).view(batch, heads, count, dim)
    return torch.einsum("bhij,bhjd->bhid", weights, repeated) if v.form == "einsum" else weights @ repeated


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, H, T, D], positions [B, T]."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, :, None] * frequency
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
        distance = slot - position[:, None]
        for layer, key, value in zip(self.blocks(), keys, values, strict=True):
            h = rms(x)
            q = layer.q(h).view(batch, count, -1, v.dim).transpose(1, 2)
            k = layer.k(h).view(batch, count, -1, v.dim).transpose(1, 2)
            if v.rotary:
                q, k = rotate(q, places), rotate(k, places)
            write(v.write, key, position, k)
            write(v.write, value, position, layer.v(h).view(batch, count, -1, v.dim).transpose(1, 2))
            out = attend(v, q, key, value, mask, distance, layer)
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
    model = TinyDecoder(variant).to(variant.dtype)
    return model, torch.compile(model, backend="sfi", dynamic=False, options=variant.options)
