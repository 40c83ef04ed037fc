"""What the compiler must find in every decoder of the sample, and a few variants that only tests need.

`EXPECTED` is the table to edit when the compiler learns something. `DECODERS` are rewritten wherever there is attention
over a cache, `PARTLY` keep some of it dense, `DENSE` all of it; `TWINS` are left out of these unless asked for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from sfi_compile.lab import families
from sfi_compile.lab.families import WINDOW as WINDOW  # of the sliding layers, in tokens
from sfi_compile.lab.families import Family, MissingFamilyError, build, cache_name
from sfi_compile.lab.family_list import FAMILIES
from sfi_compile.lab.handwritten import VOCAB as VOCAB

CACHE = cache_name()
"""The keyword of the KV cache; transformers renamed it."""

GQA, MHA, MQA = (4, 2), (4, 4), (4, 1)
"""Query heads and KV heads of every site."""

EXPECTED: dict[str, tuple[int, str, tuple[int, int]]] = {
    # name: sites rewritten in a decode step; code of each site left dense, in program order; heads of the sites
    "llama": (2, "", GQA),
    "qwen2": (2, "", GQA),
    "qwen3": (2, "", GQA),
    "qwen2-moe": (2, "", GQA),
    "qwen3-moe": (2, "", GQA),
    "mistral": (2, "", GQA),
    "mixtral": (2, "", GQA),
    "phi": (2, "", GQA),
    "phi3": (2, "", GQA),
    "phimoe": (2, "", GQA),
    "smollm3": (2, "", GQA),
    "starcoder2": (2, "", GQA),
    "olmo": (2, "", GQA),
    "olmo2": (2, "", GQA),
    "olmoe": (2, "", GQA),
    "granite": (2, "", GQA),
    "granite-moe": (2, "", GQA),
    "cohere": (2, "", GQA),
    "gemma": (2, "", GQA),
    "stablelm": (2, "", GQA),
    "glm": (2, "", GQA),
    "glm4": (2, "", GQA),
    "glm4-moe": (2, "", GQA),
    "nemotron": (2, "", GQA),
    "ernie4.5": (2, "", GQA),
    "hunyuan": (2, "", GQA),
    "arcee": (2, "", GQA),
    "helium": (2, "", GQA),
    "seed-oss": (2, "", GQA),
    "apertus": (2, "", GQA),
    "bitnet": (2, "", GQA),
    "dots1": (2, "", GQA),
    "gpt2": (2, "", MHA),
    "gpt-neox": (2, "", MHA),
    "gptj": (2, "", MHA),
    "codegen": (2, "", MHA),
    "persimmon": (2, "", MHA),
    "gpt-bigcode": (2, "", MQA),
    "falcon-mqa": (2, "", MQA),
    "falcon-new": (2, "", MHA),
    "opt": (2, "", MHA),
    "biogpt": (2, "", MHA),
    "mistral-window": (0, "rolling-window rolling-window", GQA),
    "qwen2-window": (1, "rolling-window", GQA),
    "olmo3": (1, "rolling-window", GQA),
    "cohere2": (1, "rolling-window", GQA),
    "gemma3": (1, "rolling-window", GQA),
    "exaone4": (1, "rolling-window", GQA),
    "llama4": (1, "rolling-window", GQA),
    "llama-eager": (2, "", GQA),
    "gptj-eager": (2, "", MHA),
    "gpt-neo": (2, "", MHA),
    "xglm": (2, "", MHA),
    "gemma2": (1, "rolling-window", GQA),
    "vaultgemma": (1, "rolling-window", GQA),
    "gpt-oss": (1, "rolling-window", GQA),
    "bloom": (2, "", MHA),
    "mpt": (0, "split-attention", MHA),
    "falcon-alibi": (2, "", MHA),
    "diffllama": (4, "", GQA),
    "deepseek-v2": (2, "", MHA),
    "deepseek-v3": (2, "", MHA),
    "jamba": (1, "", GQA),
    "qwen3-next": (1, "", GQA),
    "minimax": (0, "growing-cache", GQA),
    "lfm2": (1, "", GQA),
    "falcon-h1": (2, "", GQA),
    "granite-moe-hybrid": (1, "", GQA),
    "bart": (2, "no-cache-write no-cache-write", MHA),
    "mbart": (2, "no-cache-write no-cache-write", MHA),
    "pegasus": (2, "no-cache-write no-cache-write", MHA),
    "marian": (2, "no-cache-write no-cache-write", MHA),
    "whisper": (2, "no-cache-write no-cache-write", MHA),
    "t5": (2, "no-cache-write no-cache-write", MHA),
    "gpt-fast": (2, "", GQA),
    "bshd-cache": (2, "", GQA),
    "scatter-cache": (2, "", GQA),
    "slice-cache": (2, "", GQA),
    "narrow-cache": (2, "", GQA),
    "int8-cache": (2, "", GQA),
    "x-transformers": (2, "", MHA),
    "permuted-key": (2, "", GQA),
    "grouped-matmul": (2, "", GQA),
    "alibi": (2, "", GQA),
    "latent": (2, "", MHA),
    "latent-absorbed": (2, "", MQA),
    "multihead-attention": (0, "opaque-module opaque-module", MHA),
    "nanogpt": (0, "", MHA),
    "growing-cache": (0, "growing-cache growing-cache", GQA),
    # variants for tests
    "llama-group3": (2, "", (6, 2)),
    "llama-group5": (2, "", (10, 2)),
    "llama-group6": (2, "", (12, 2)),
    "llama-group7": (2, "", (14, 2)),
    "llama-mqa": (2, "", MQA),
    "training": (0, "dropout dropout", GQA),
}

TWINS = frozenset(
    "qwen2 qwen2-moe mistral mixtral phimoe smollm3 olmo olmoe granite-moe stablelm glm4-moe nemotron ernie4.5 hunyuan "
    "arcee helium seed-oss apertus bitnet dots1 codegen persimmon biogpt qwen2-window olmo3 exaone4 granite-moe-hybrid "
    "mbart pegasus marian gptj-eager vaultgemma deepseek-v2".split()
)
"""Their decode step is to the compiler what that of another entry is. Tracing is what a test of a family costs, so only
`make thorough` compiles these."""

EXPLAINED = {
    "mpt": "graph-break",
    "nanogpt": "query-length",
}
"""What `explain` says where the backend has nothing to say."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A family, and what must be found in it."""

    family: Family
    sites: int
    """Attention sites rewritten in a decode step."""
    codes: tuple[str, ...]
    """Rejection code of every site left dense, in program order."""
    query_heads: int
    kv_heads: int

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def explained(self) -> tuple[str, ...]:
        """Rejection codes of `explain`."""
        return (EXPLAINED[self.name],) if self.name in EXPLAINED else self.codes

    def build(self) -> tuple[Any, Any]:
        """Model and its config, None for a hand-written decoder; skips the test if transformers does not have it."""
        try:
            model = self.family.build()
        except MissingFamilyError as missing:
            pytest.skip(str(missing))
        return model, getattr(model, "config", None)

    def cache(self, model: Any, batch: int, length: int) -> Any:
        return self.family.cache(model, batch, length)

    def call(self, forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
        return self.family.call(forward, tokens, cache, position)


def llama(query_heads: int, kv_heads: int, **changes: Any) -> Callable[[], Any]:
    """A builder of a Llama with any grouping; head dimension 16."""
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * query_heads}
    return build("Llama", **heads, head_dim=16, **changes)


VARIANTS: tuple[Family, ...] = (
    *(Family(f"llama-group{g}", llama(2 * g, 2)) for g in (3, 5, 6, 7)),
    Family("llama-mqa", llama(4, 1)),
    Family("training", build("Llama", attention_dropout=0.1, train=True)),
)


def _decoder(family: Family) -> Decoder:
    sites, codes, (query_heads, kv_heads) = EXPECTED[family.name]
    return Decoder(family, sites, tuple(codes.split()), query_heads, kv_heads)


BY_NAME = {family.name: _decoder(family) for family in (*FAMILIES, *VARIANTS)}
ENTRIES = [d for d in BY_NAME.values() if d.name not in TWINS or os.environ.get("HYPOTHESIS_PROFILE") == "thorough"]
"""What tests compile."""
DECODERS = [d for d in ENTRIES if d.sites and not d.codes]
PARTLY = [d for d in ENTRIES if d.sites and d.codes]
DENSE = [d for d in ENTRIES if not d.sites]


def whole(decoder: Decoder, model: Any, tokens: Tensor) -> Tensor:
    """Logits [batch, tokens, vocab] of one forward over all `tokens`, for transformers without any cache."""
    cache = decoder.cache(model, *tokens.shape)
    if decoder.family.cache is families.own_cache:
        return decoder.call(model.forward, tokens, cache, 0)
    if decoder.family.cache is families.encoder_decoder_cache:
        return model(encoder_outputs=cache.encoded, decoder_input_ids=tokens, use_cache=False).logits
    return model(tokens, use_cache=False).logits
