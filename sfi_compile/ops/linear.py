"""Linear layers of a step of few tokens: all that read one input, in one operator. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from sfi_compile.ops.registration import fake_of, operator


@operator()
def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]]) -> list[Tensor]:  # noqa: UP045
    """`torch.nn.functional.linear` of one input with several weights.

    Args:
        x: [..., K].
        weights: [N, K] each; N may differ.
        biases: [N] or None, one for each weight.

    Returns:
        [..., N] for each weight.
    """
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


@fake_of(linear)
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
