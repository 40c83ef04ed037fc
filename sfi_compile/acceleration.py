"""`accelerate`: set a transformers model up so that `generate()` runs slow and fast steps."""

from __future__ import annotations

from typing import Any, TypeVar

from sfi_compile.boundaries import sentence_boundaries
from sfi_compile.compat.inductor import mode_patches
from sfi_compile.config import Config

Model = TypeVar("Model", bound=Any)


def accelerate(model: Model, tokenizer: Any = None, **options: Any) -> Model:
    """Compile a model in place with `backend="sfi"`, and make `generate()` use what the backend needs.

    The model is put into eval mode, its `forward` is compiled, and its generation config gets a static cache.
    (`torch.compile(model).generate(...)` never runs the compiled forward: `generate` belongs to the inner model.)

    Args:
        model: a transformers model with `generate`; any other module is only compiled.
        tokenizer: where the boundary tokens come from, unless `boundary_token_ids` is given. None: interval only.
        **options: fields of `Config`; `mode=` as for Inductor.

    Returns:
        The same model.

    Raises:
        OptionError: a bad option.
        TypeError: a tokenizer without a vocabulary, or a model that cannot be compiled in place.
    """
    if not hasattr(model, "compile"):
        raise TypeError(f"accelerate: model is {type(model).__name__}; allowed: a torch.nn.Module")
    if tokenizer is not None and "boundary_token_ids" not in options:
        options["boundary_token_ids"] = sentence_boundaries(tokenizer)
    config = Config.from_options(options)
    mode_patches(config.mode)
    model.eval()
    model.compile(backend="sfi", options=options)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.cache_implementation = "static"
        # generate() would otherwise compile the forward again, with its own backend.
        generation.disable_compile = True
    return model
