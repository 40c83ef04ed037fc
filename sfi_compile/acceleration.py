"""`accelerate`: set a transformers model up so that `generate()` runs slow and fast steps."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from sfi_compile.boundaries import sentence_boundaries
from sfi_compile.compat.module import compile_calls
from sfi_compile.config import Config, OptionError
from sfi_compile.passes.base import MOST_QUERIES

Model = TypeVar("Model", bound=Any)

STEP_TOKENS = MOST_QUERIES
"""Most new tokens a row of a call that is compiled: one token, or a few drafted ones to verify. More are a prompt."""

_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("cache", "past_key_values")


def accelerate(model: Model, tokenizer: Any = None, max_cache_len: int | None = None, **options: Any) -> Model:
    """Compile a model in place with `backend="sfi"`, and make `generate()` use what the backend needs.

    The model is put into eval mode, its decode steps are compiled, and its generation config gets a static cache.
    (`torch.compile(model).generate(...)` never runs the compiled forward: `generate` belongs to the inner model.)

    Prompts run uncompiled: a call with more than `STEP_TOKENS` tokens a row, or on a cache that has not been allocated.
    Each length would be a graph of its own, and a cache allocated within a graph has no fixed address, which CUDA
    graphs need. Every accelerated model has Dynamo's recompile limit for itself.

    A cache of your own goes into an accelerated model as `generate(..., cache=cache, cache_implementation=None)`
    (`past_key_values=` in older transformers).

    Args:
        model: a transformers model with `generate`; any other module is only compiled.
        tokenizer: where the boundary tokens come from, unless `boundary_token_ids` is given. None: interval only.
        max_cache_len: positions of the static cache that `generate()` allocates, prompt and new tokens together: one
            decode graph per batch size then serves every request. A request that needs more gets a longer cache, and
            so do all after it. Prompt lookup drafts past the end: add `prompt_lookup_num_tokens`. None: as many as
            the longest request so far needed, with a new graph each time that grows.
        **options: fields of `Config`; `mode=` as for Inductor.

    Returns:
        The same model.

    Raises:
        OptionError: a bad option, `max_cache_len` below 1, or `max_cache_len` for a model without `generate`.
        TypeError: a tokenizer without a vocabulary, or a model that cannot be compiled in place.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate: model is {type(model).__name__}; allowed: a torch.nn.Module")
    generation = getattr(model, "generation_config", None)
    max_cache_len = _checked(max_cache_len, model if generation is None else None)
    if tokenizer is not None and "boundary_token_ids" not in options:
        options["boundary_token_ids"] = sentence_boundaries(tokenizer)
    Config.from_options(options)
    model.eval()
    compile_calls(model, _is_step, backend="sfi", options=options)
    if generation is not None:
        generation.cache_implementation = "static"
        # generate() would otherwise compile the forward again, with its own backend.
        generation.disable_compile = True
        if max_cache_len is not None:
            generation.max_cache_len = max_cache_len
            # Where generate() keeps the longest cache that it has made: it may be longer.
            vars(model).pop("_previous_max_cache_length", None)
    return model


def _checked(max_cache_len: Any, no_generation: Any) -> int | None:
    """`max_cache_len` as a plain number; `no_generation` is the model if it cannot `generate()`."""
    if max_cache_len is None:
        return None
    name = f"accelerate: max_cache_len is {max_cache_len!r}"
    if no_generation is not None:
        raise OptionError(f"{name}, but {type(no_generation).__name__} has no generate(); allowed: None")
    try:
        number = operator.index(max_cache_len)
    except TypeError:
        number = 0
    if isinstance(max_cache_len, bool) or number < 1:
        raise OptionError(f"{name}; allowed: a whole number >= 1, or None")
    return number


def _is_step(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model that is called so decodes: few new tokens, on a cache that is there, as far as one can tell."""
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    if not getattr(getattr(cache, "self_attention_cache", cache), "is_initialized", True):
        return False
    named = [kwargs[name] for name in _TOKENS if kwargs.get(name) is not None]
    for given in (*named, *args):
        if isinstance(given, torch.Tensor):
            tokens = given.dim() == (3 if given.is_floating_point() else 2)  # embeddings, ids
            return not tokens or given.shape[1] <= STEP_TOKENS
    return True
