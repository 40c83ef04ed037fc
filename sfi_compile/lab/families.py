"""How to build and call a tiny decoder of any family: builders, empty caches, one call. Imports the lab.

transformers is imported when a decoder is built. The list itself is `lab.family_list`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sfi_compile.lab.errors import LabError
from sfi_compile.lab.handwritten import LAYERS, MAX_POSITION, VOCAB, CachelessDecoder, OwnDecoder
from sfi_compile.lab.models import cache_keyword, import_transformers

Builder = Callable[[], Any]
CacheMaker = Callable[[Any, int, int], Any]
Caller = Callable[[Callable[..., Any], Tensor, Any, int], Tensor]

WINDOW = 8
"""Of sliding layers, in tokens."""
SOURCE = 9
"""Tokens (spectrogram frames: 24) that an encoder reads."""


class MissingFamilyError(LabError):
    """The installed transformers does not have this decoder, or not with this attention."""


@functools.cache
def cache_name() -> str:
    """The keyword under which transformers' decoders take the KV cache."""
    return cache_keyword(import_transformers().LlamaForCausalLM)


def static_cache(model: Any, batch: int, length: int) -> Any:
    """transformers' preallocated cache; it takes its batch from the first keys it sees."""
    return import_transformers().StaticCache(config=model.config, max_cache_len=length)


def dynamic_cache(model: Any, batch: int, length: int) -> Any:
    """transformers' growing cache."""
    return import_transformers().DynamicCache(config=model.config)


def minimax_cache(model: Any, batch: int, length: int) -> Any:
    """The only cache that MiniMax takes; it grows."""
    import_transformers()
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


def encoder_decoder_cache(model: Any, batch: int, length: int) -> Any:
    """A preallocated cache for the decoder, beside the encoder's output for a random source, as `encoded`."""
    transformers = import_transformers()
    cache = transformers.EncoderDecoderCache(static_cache(model, batch, length), transformers.DynamicCache())
    generator = torch.Generator().manual_seed(1)
    if hasattr(model.config, "num_mel_bins"):
        frames = 2 * model.config.max_source_positions
        source = torch.randn(batch, model.config.num_mel_bins, frames, generator=generator)
    else:
        source = torch.randint(2, VOCAB, (batch, SOURCE), generator=generator)
    cache.encoded = model.get_encoder()(source)
    return cache


def own_cache(model: Any, batch: int, length: int) -> Any:
    """A hand-written decoder's caches, which are its buffers."""
    return model.setup_caches(batch, length)


def call_causal(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """A causal decoder of transformers; the cache knows the position."""
    return forward(tokens, use_cache=True, **{cache_name(): cache}).logits  # type: ignore[no-any-return]


def call_positioned(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """The same with explicit positions."""
    where = torch.arange(position, position + tokens.shape[1])[None]
    keywords = {"position_ids": where, cache_name(): cache}
    return forward(tokens, use_cache=True, **keywords).logits  # type: ignore[no-any-return]


def call_masked(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """The same with positions and a 2-D mask over the whole cache: without them it reads a length on the host."""
    where = torch.arange(position, position + tokens.shape[1])[None]
    mask = torch.ones(tokens.shape[0], cache.layers[0].max_cache_len, dtype=torch.long)
    keywords = {"attention_mask": mask, "position_ids": where, cache_name(): cache}
    return forward(tokens, use_cache=True, **keywords).logits  # type: ignore[no-any-return]


def call_encoder_decoder(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """The decoder half of an encoder-decoder; the cache brings the encoder's output along."""
    keywords = {"encoder_outputs": cache.encoded, "decoder_input_ids": tokens, cache_name(): cache}
    return forward(use_cache=True, **keywords).logits  # type: ignore[no-any-return]


def call_with_positions(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """A hand-written decoder, which takes the positions of its tokens."""
    return forward(tokens, torch.arange(position, position + tokens.shape[1]))  # type: ignore[no-any-return]


def call_with_number(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """A hand-written decoder, which takes the position of the first token as a Python int."""
    return forward(tokens, position)  # type: ignore[no-any-return]


def call_with_history(forward: Callable[..., Any], tokens: Tensor, cache: Any, position: int) -> Tensor:
    """A decoder without a KV cache, which takes the whole text."""
    return forward(cache.extended(tokens))[:, -tokens.shape[1] :]  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Family:
    """A decoder family: how to build a tiny one and how to decode with it. A decode step has one new token a row."""

    name: str
    build: Builder
    """A new model in float32 on the CPU, weights from a fixed seed, without gradients, in eval mode. Raises
    MissingFamilyError."""
    cache: CacheMaker = static_cache
    """(model, batch, positions) → an empty cache: a transformers cache, or a module with buffers."""
    call: Caller = call_causal
    """(forward, tokens int64 [batch, new], cache, position of the first of them) → logits [batch, new, vocab]."""


def build(
    family: str, head: str = "ForCausalLM", implementation: str = "sdpa", train: bool = False, **changes: Any
) -> Builder:
    """A builder of a transformers decoder; `...` drops a setting.

    Weights are larger than usual: attention is then peaked, and greedy decoding has no near ties.

    Args:
        family: "Llama" for `LlamaConfig`.
        head: what comes after it in the model's name, or with a dot before it the whole name.
        implementation: of attention.
        train: leave the model in training mode.
        **changes: settings of the configuration.
    """
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
    settings = {key: value for key, value in (usual | changes).items() if value is not ...}
    return functools.partial(_build, family + "Config", head[1:] if head[0] == "." else family + head, settings, train)


def _build(config_name: str, model_name: str, settings: dict[str, Any], train: bool) -> Any:
    transformers = import_transformers()
    wanted = settings["attn_implementation"]
    for name in (config_name, model_name):
        if not hasattr(transformers, name):
            raise MissingFamilyError(f"transformers {transformers.__version__} has no {name}")
    model_class = getattr(transformers, model_name)
    if wanted == "sdpa" and not model_class._supports_sdpa:
        raise MissingFamilyError(f"{model_name} of transformers {transformers.__version__} has no attention 'sdpa'")
    from huggingface_hub.errors import StrictDataclassError

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = getattr(transformers, config_name)(**settings)
            model = model_class(config).train(train).requires_grad_(False)
        except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
            reason = str(error).strip().splitlines()[0]
            raise MissingFamilyError(f"transformers {transformers.__version__}: {config_name}: {reason}") from error
    model.generation_config.eos_token_id = None
    return model


def own(block: Callable[..., nn.Module], **settings: Any) -> Builder:
    """A builder of a hand-written decoder of such blocks."""
    return functools.partial(_build_own, lambda: OwnDecoder(lambda: block(64, 4, **settings)))


def cacheless() -> Builder:
    """A builder of a hand-written decoder without a KV cache."""
    return functools.partial(_build_own, CachelessDecoder)


def _build_own(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.2)
    return model.eval().requires_grad_(False)


def next_step(family: Family, model: Any, prompt: Tensor, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Prefill an empty cache of `length` positions with `prompt`, int64 [batch, tokens].

    Returns:
        The arguments with which the decode step that follows calls `model.forward`.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def capture(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _Captured

    with torch.no_grad(), contextlib.suppress(_Captured):
        cache = family.cache(model, prompt.shape[0], length)
        logits = family.call(model.forward, prompt, cache, 0)
        family.call(capture, logits[:, -1:].argmax(-1), cache, prompt.shape[1])
    return found[0]


class _Captured(Exception):
    """Ends a call whose arguments are known."""
