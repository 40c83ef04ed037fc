"""Passages as rows of a batch, and what dense attention says of them. Imports torch and the lab.

What is kept of every task lies on the host: a device has room for one cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sfi_compile.lab.decode import prefill
from sfi_compile.lab.models import cache_keyword
from sfi_compile.lab.shapes import rewind
from sfi_compile.lab.tasks import Passage

CHUNK = 32
"""Tokens after the context that the model takes at once: bounds the logits of a large vocabulary."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """A task's passages as rows of a batch, with what dense attention says of them."""

    tokens: Tensor
    """int64 [B, steps], fed to the steps: the context's last token, then the targets but for the last."""
    targets: Tensor
    """int64 [B, steps]."""
    scored: Tensor
    """bool [B, steps]."""
    log_probabilities: Tensor
    """float32 [scored, vocabulary], of dense attention, row by row; on the CPU."""
    filled: tuple[tuple[Tensor, ...], ...]
    """Keys and values of each layer, [B, heads, context, width], of the cache before the first step; on the CPU."""
    context: int
    """Tokens in the cache before the first step."""
    lengths: tuple[int, ...]
    """Of each row, the steps whose targets are the passage's."""

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.tokens.shape[1]

    @classmethod
    def of(cls, model: Any, cache: Any, rows: list[Passage], advance: Callable[[int], None]) -> Reference:
        """Run the passages through the uncompiled model."""
        device = model.device
        lengths = tuple(len(row.targets) for row in rows)
        steps = max(lengths)
        # A shorter row goes on with its last token, which does not count.
        padded = [(*row.targets, *(row.targets[-1:] * (steps - len(row.targets)))) for row in rows]
        targets = torch.tensor(padded, device=device)
        context = torch.tensor([row.context for row in rows], device=device)
        scored = torch.tensor([[*row.scored, *[False] * (steps - len(row.scored))] for row in rows], device=device)
        tokens = torch.cat([context[:, -1:], targets[:, :-1]], 1)
        cache.reset()
        prefill(model, context[:, :-1], cache, advance)
        length = context.shape[1] - 1
        filled = tuple(
            tuple(x[:, :, :length].to("cpu", copy=True) for x in (layer.keys, layer.values)) for layer in cache.layers
        )
        found: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, steps, CHUNK):
            piece = tokens[:, start : start + CHUNK]
            with torch.no_grad():
                logits = model(piece, **{cache_keyword(model): cache, "use_cache": True}).logits
            for b, count in enumerate(scored[:, start : start + CHUNK]):
                found[b].append(log_probabilities(logits[b][count]).cpu())
            advance(piece.shape[1])
        return cls(tokens, targets, scored, torch.cat([part for row in found for part in row]), filled, length, lengths)

    def restore(self, cache: Any) -> None:
        """Fill a cache as it was before the first step."""
        for layer, (keys, values) in zip(cache.layers, self.filled, strict=True):
            layer.keys[:, :, : self.context] = keys
            layer.values[:, :, : self.context] = values
        rewind(cache, self.context)


def log_probabilities(logits: Tensor) -> Tensor:
    """Of logits, in float32."""
    return logits.float().log_softmax(-1)
