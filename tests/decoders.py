"""The sample database: small random decoders, what the compiler must find in each, and how each is called.

Every entry builds in well under a second. `DECODERS` are rewritten in every layer; `PARTLY` keep some attention dense,
`DENSE` all of it, each with the rejection codes that say why.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.handwritten import LAYERS, MAX_POSITION, VOCAB, OpaqueBlock, OwnBlock, OwnDecoder

WINDOW = 8
"""Of the sliding layers, in tokens."""

transformers.utils.logging.set_verbosity_error()

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""The keyword of the KV cache; transformers renamed it."""

Builder = Callable[[], tuple[Any, Any]]
Caller = Callable[[Callable[..., Any], Tensor, Any, int], Tensor]


def static_cache(model: Any, batch: int, length: int) -> Any:
    """transformers' preallocated cache; it takes its batch from the first keys it sees."""
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def dynamic_cache(model: Any, batch: int, length: int) -> Any:
    """transformers' growing cache."""
    return transformers.DynamicCache(config=model.config)


def call_transformers(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """How a causal decoder of transformers is called; the cache knows the position."""
    return forward(tokens, use_cache=True, **{CACHE: cache}).logits


def call_encoder_decoder(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """The decoder half of an encoder-decoder; the cache brings the encoder's output along."""
    return forward(encoder_outputs=cache.encoded, decoder_input_ids=tokens, use_cache=True, **{CACHE: cache}).logits


def call_with_positions(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """A hand-written decoder, which takes the positions of its tokens."""
    return forward(tokens, torch.arange(position, position + tokens.shape[1]))


def own_cache(model: Any, batch: int, length: int) -> Any:
    """A hand-written decoder's caches, which are its buffers."""
    return model.setup_caches(batch, length)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """One entry. A decode step has one new token a row."""

    name: str
    build: Builder
    """Model in float32, weights from a fixed seed, in eval mode unless its name says otherwise; and its config, None
    for a hand-written decoder."""
    query_heads: int = 4
    kv_heads: int = 2
    sites: int = LAYERS
    """Attention sites rewritten in a decode step."""
    codes: tuple[str, ...] = ()
    """Rejection code of every site left dense, in program order."""
    cache: Callable[[Any, int, int], Any] = static_cache
    """(model, batch, positions) → an empty cache: a transformers cache, or a module with buffers."""
    call: Caller = call_transformers
    """(forward, tokens int64 [batch, new], cache, position of the first of them) → logits [batch, new, vocab]."""


def build(
    family: str, head: str = "ForCausalLM", implementation: str = "sdpa", train: bool = False, **changes: Any
) -> Builder:
    """A builder of a transformers decoder; `...` drops a setting. Weights are larger than usual: attention is then
    peaked, and greedy decoding has no near ties."""
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_implementation": implementation,
    }

    def make() -> tuple[Any, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, family + "Config")(**_given(usual | changes))
            torch.manual_seed(0)
            model = getattr(transformers, family + head)(config).train(train).requires_grad_(False)
        model.generation_config.eos_token_id = None
        return model, config

    return make


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not ...}


def llama(query_heads: int, kv_heads: int, **changes: Any) -> Builder:
    """Llama with any grouping; head dimension 16."""
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * query_heads}
    return build("Llama", **heads, head_dim=16, **changes)


def _encoder_decoder_cache(model: Any, batch: int, length: int) -> Any:
    decoder = static_cache(model, batch, length)
    cache = transformers.EncoderDecoderCache(decoder, transformers.DynamicCache())
    generator = torch.Generator().manual_seed(1)
    cache.encoded = model.get_encoder()(torch.randint(2, VOCAB, (batch, 9), generator=generator))
    return cache


def own(block: Callable[..., nn.Module], *settings: Any) -> Builder:
    """A builder of a hand-written decoder."""

    def make() -> tuple[Any, None]:
        torch.manual_seed(0)
        model = OwnDecoder(lambda: block(64, 4, *settings))
        for weight in model.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.2)
        return model.eval().requires_grad_(False), None

    return make


_GPT2 = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": MAX_POSITION, "num_key_value_heads": ...}
_OWN: dict[str, Any] = {"cache": own_cache, "call": call_with_positions}
_ALL: dict[str, Any] = {"num_key_value_heads": ..., "num_attention_heads": ..., "hidden_size": ...}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": LAYERS, "num_heads": 4, "num_hidden_layers": ...}
_BART = {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in
         (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
_CROSS: dict[str, Any] = {"cache": _encoder_decoder_cache, "call": call_encoder_decoder}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4, "first_k_dense_replace": LAYERS, "n_group": 1, "topk_group": 1}  # fmt: skip
_SOFTCAP = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}

DECODERS: tuple[Decoder, ...] = (
    Decoder("llama", build("Llama")),
    Decoder("qwen2", build("Qwen2")),
    Decoder("qwen3", build("Qwen3", head_dim=16)),
    Decoder("mistral", build("Mistral", sliding_window=None)),
    Decoder("phi3", build("Phi3", sliding_window=None)),
    Decoder("smollm3", build("SmolLM3")),
    Decoder("starcoder2", build("Starcoder2", sliding_window=None)),
    Decoder("olmo2", build("Olmo2")),
    Decoder("granite", build("Granite", attention_multiplier=0.1)),
    Decoder("gpt2", build("GPT2", "LMHeadModel", **_GPT2), kv_heads=4),
    Decoder("gptneox", build("GPTNeoX", num_key_value_heads=...), kv_heads=4),
    Decoder("gpt-fast", own(OwnBlock, 2, "bhsd", "sdpa"), **_OWN),
    Decoder("bshd-cache", own(OwnBlock, 2, "bshd", "sdpa"), **_OWN),
    *(Decoder(f"llama-group{g}", llama(2 * g, 2), query_heads=2 * g) for g in (3, 5, 6, 7)),
    Decoder("llama-mqa", llama(4, 1), kv_heads=1),
)
"""Rewritten in every layer."""

_HALF_WINDOW = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

PARTLY: tuple[Decoder, ...] = (
    Decoder("cohere2", build("Cohere2", head_dim=16, **_HALF_WINDOW), sites=1, codes=("cache-write",)),
    Decoder("qwen2-window", build("Qwen2", use_sliding_window=True, **_HALF_WINDOW), sites=1, codes=("cache-write",)),
    Decoder("bart", build("Bart", "ForConditionalGeneration", d_model=64, num_hidden_layers=..., **_ALL, **_BART),
            kv_heads=4, codes=("no-cache-write",) * LAYERS, **_CROSS),
)  # fmt: skip
"""Some layers rewritten; for a prompt longer than `WINDOW`."""

DENSE: tuple[Decoder, ...] = tuple(
    dataclasses.replace(decoder, sites=0)
    for decoder in (
        Decoder("mistral-window", build("Mistral", sliding_window=WINDOW), codes=("cache-write",) * LAYERS),
        Decoder("gemma2-eager", build("Gemma2", implementation="eager", **_SOFTCAP), codes=("softmax-chain",) * LAYERS),
        Decoder("llama-eager", build("Llama", implementation="eager"), codes=("softmax-chain",) * LAYERS),
        Decoder("permuted-key", own(OwnBlock, 2, "bshd", "permuted"), codes=("softmax-chain",) * LAYERS, **_OWN),
        Decoder("growing-cache", build("Llama"), codes=("not-commutable",) * LAYERS, cache=dynamic_cache),
        Decoder("training", build("Llama", attention_dropout=0.1, train=True), codes=("dropout",) * LAYERS),
        Decoder("mla", build("DeepseekV3", **_MLA), codes=("not-commutable",) * LAYERS),
        Decoder("multihead-attention", own(OpaqueBlock), codes=("opaque-module",) * LAYERS, **_OWN),
        Decoder("t5", build("T5", "ForConditionalGeneration", **_ALL, **_T5),
                codes=("mask-heads", "no-cache-write") * LAYERS, **_CROSS),
    )
)  # fmt: skip
"""Left alone in every layer; for a prompt longer than `WINDOW`."""

BY_NAME = {decoder.name: decoder for decoder in (*DECODERS, *PARTLY, *DENSE)}
