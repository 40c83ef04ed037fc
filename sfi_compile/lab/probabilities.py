"""Attention probabilities of a dense model, layer by layer as it runs. Imports `lab.errors` only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from sfi_compile.lab.errors import LabError

CHUNK = 32
"""Tokens that attend in one call of the model, at most."""
CHUNK_BYTES = 2**27
"""Size of one layer's float32 probabilities of such a chunk, of all query heads, at most (one token always fits)."""


def tokens_at_once(model: Any, batch: int, positions: int) -> int:
    """How many tokens of each row of a batch to give a model whose probabilities over `positions` are wanted."""
    heads = int(model.config.get_text_config().num_attention_heads)
    return max(1, min(CHUNK, math.floor(CHUNK_BYTES / (4 * batch * heads * positions))))


@contextlib.contextmanager
def probabilities_of(
    model: Any, layers: Sequence[int] | None, positions: int, each: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While it lasts, the model attends eagerly, and `each` gets (layer, probabilities) of every layer as it runs.

    Probabilities are float32 [batch, tokens, kv_heads, positions], averaged over the query heads of the group. They are
    dropped after the call, so that no two layers' are held. Layers that do not attend to all `positions` of the static
    cache (sliding windows, linear attention) are passed over.

    Raises:
        LabError: the model's attention cannot be made eager.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise LabError(
            f"{type(model).__name__} cannot be set to eager attention, so it gives no probabilities; allowed: decoders "
            "on the attention interface of transformers"
        )

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[-1] != positions:
            return
        group = int(getattr(module, "num_key_value_groups", 0)) or _group(model, weights.shape[1])
        grouped = weights.float().unflatten(1, (-1, group)).mean(2)  # type: ignore[no-untyped-call]
        each(_layer(module), grouped.transpose(1, 2))

    hooks = [
        module.register_forward_hook(hook) for module in _numbered(model) if layers is None or _layer(module) in layers
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
        model.set_attn_implementation(before)


def _layer(module: nn.Module) -> int:
    """The number of the layer that a module is part of; -1 of a module that does not know."""
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else -1


def _numbered(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that know their layer: attention, not the decoder layer around it."""
    known = [module for module in model.modules() if _layer(module) >= 0]
    return [module for module in known if not any(_layer(part) >= 0 for part in module.modules() if part is not module)]


def _group(model: Any, query_heads: int) -> int:
    kv_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None) or query_heads
    return max(query_heads // int(kv_heads), 1)
