"""Decoders of known shapes with random weights, and caches filled with random keys and values: no download, no prefill.

Imports `lab.errors` and `lab.models`.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Literal

import torch

from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import import_transformers, static_cache


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    family: Literal["llama", "qwen3", "qwen3_moe"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    """The output projection is the embedding table."""
    experts: int = 0
    """Experts of a mixture; `intermediate` is then the width of one."""
    experts_used: int = 0
    """Experts that a token goes to."""

    def support_bytes(self, batch: int, support: float, itemsize: int) -> float:
        """Bytes of the keys and values of `support` tokens per row and KV head, over all layers."""
        return 2 * self.layers * batch * self.kv_heads * support * self.head_dim * itemsize


SHAPES: dict[str, Shape] = {
    "tiny-cpu": Shape("llama", 4, 512, 8, 2, 64, 1536, 8192),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936),
    "qwen3-30b-a3b": Shape("qwen3_moe", 48, 2048, 32, 4, 128, 768, 151936, False, experts=128, experts_used=8),
    "llama3-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
}
"""What `sfi bench --shape` knows."""


def find_shape(name: str, layers: int | None = None) -> Shape:
    """The shape of that name, with its first `layers` layers (None: all).

    Raises:
        LabError: an unknown name, with the names allowed, or more layers than there are.
    """
    if name not in SHAPES:
        close = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise LabError(f"unknown shape {name!r}; {hint}allowed: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if layers is None:
        return shape
    if not 1 <= layers <= shape.layers:
        raise LabError(f"--layers {layers}: {name} has {shape.layers}; allowed: 1 to {shape.layers}")
    return dataclasses.replace(shape, layers=layers)


def build(shape: Shape, dtype: torch.dtype, device: str, max_positions: int) -> Any:
    """A transformers decoder of that shape with random weights (seeded by torch's generator), in eval mode."""
    transformers = import_transformers()
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    mixture = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "moe_intermediate_size": shape.intermediate,
    }
    config = classes[shape.family](
        **(mixture if shape.experts else {}),
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=max_positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def filled_cache(model: Any, shape: Shape, batch: int, context: int, max_cache_len: int) -> Any:
    """A static cache of `max_cache_len` positions whose first `context` hold random keys and values."""
    cache = static_cache(model, max_cache_len)
    cache.early_initialization(batch, shape.kv_heads, shape.head_dim, model.dtype, model.device)
    for layer in cache.layers:
        layer.keys[:, :, :context].normal_()
        layer.values[:, :, :context].normal_()
    rewind(cache, context)
    return cache


def rewind(cache: Any, context: int) -> None:
    """Make the cache hold exactly its first `context` tokens; addresses stay."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values of all layers, used or not."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def weight_bytes(model: Any, shape: Shape, tokens: int = 1) -> int:
    """Bytes of weights that a decode step of so many tokens reads: all of them, but of an untied input embedding only a
    few rows, and of a mixture the experts that different tokens go to, as many as can differ."""
    total: int = sum(p.numel() * p.element_size() for p in model.parameters())
    if not shape.tied:
        table = model.get_input_embeddings().weight
        total -= table.numel() * table.element_size()
    if shape.experts:
        expert = 3 * shape.hidden * shape.intermediate * model.dtype.itemsize
        idle = max(0, shape.experts - tokens * shape.experts_used)
        total -= shape.layers * idle * expert
    return total
