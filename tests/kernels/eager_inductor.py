"""`sfi_compile.compat.template` with tensors for IR nodes: lowerings run as they are, and at once.

Pointwise bodies are evaluated by torch, and a template's kernel is launched as a plain one, so this belongs inside
`tests.kernels.triton_tools.interpreted`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sfi_compile.kernels import heuristics, linear_lowering, linear_tiles, lowering
from sfi_compile.kernels.linear_tiles import LinearTile
from tests.kernels import rendering
from tests.kernels.rendering import Operand


def lowered_memory_attention(splits: int, tile: dict[str, int], *args: Any) -> Tensor:
    """The lowering of `sfi::memory_attention`, with so many splits and constants of the tile replaced."""
    inductor = EagerInductor(tile, ("Q", "K", "V", "BIAS", "LENGTH"))
    with (
        mock.patch.object(lowering, "inductor", inductor),
        mock.patch.object(lowering, "_template", return_value="memory_attention"),
        mock.patch.object(heuristics, "memory_splits", return_value=splits),
    ):
        found: Tensor = lowering.lower_memory_attention(*args)
    return found


def lowered_linear(tile: LinearTile, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """The lowering of `sfi::linear`, with this tile."""
    inductor = EagerInductor({}, ("X", "W0", "W1", "W2"))
    with (
        mock.patch.object(linear_lowering, "inductor", inductor),
        mock.patch.object(linear_lowering, "_template", return_value="linear"),
        mock.patch.object(linear_tiles, "tile_for", return_value=tile),
    ):
        found: list[Tensor] = linear_lowering.lower_linear(x, weights, biases)
    return found


class EagerInductor:
    """The functions of `compat.template` that lowerings call."""

    shape_of = staticmethod(lambda x: tuple(x.shape))
    dtype_of = staticmethod(lambda x: x.dtype)
    device_of = staticmethod(lambda x: torch.device("cuda", 0))
    realised = read_inside = staticmethod(lambda x: x)
    viewed = staticmethod(torch.Tensor.reshape)
    tries_several = staticmethod(lambda: False)
    quotient = staticmethod(operator.floordiv)
    remainder = staticmethod(operator.mod)

    processors = staticmethod(lambda device: 1)
    shared_memory = staticmethod(lambda device: 1 << 17)

    def __init__(self, tile: dict[str, int], names: tuple[str, ...]) -> None:
        self.tile, self.names = tile, names

    def loader(self, x: Tensor) -> Callable[..., Tensor]:
        return lambda *index: x[tuple(index)]

    def operators(self) -> Any:
        return SimpleNamespace(
            constant=lambda value, dtype: torch.tensor(value, dtype=dtype),
            to_dtype=lambda x, dtype: x.to(dtype),
            and_=torch.logical_and,
            truediv=torch.true_divide,
            **{name: getattr(torch, name) for name in ("add", "eq", "exp", "ge", "maximum", "mul", "sub", "where")},
        )

    def pointwise(self, shape: Sequence[int], dtype: torch.dtype, device: Any, body: Callable[..., Tensor]) -> Tensor:
        axes = [torch.arange(size) for size in shape]
        found = body(*torch.meshgrid(*axes, indexing="ij"))
        assert found.dtype == dtype
        return found.expand(tuple(shape))

    def choose(
        self,
        template: str,
        inputs: Sequence[Tensor],
        output: tuple[Sequence[int], torch.dtype],
        grid: tuple[int, int, int],
        choices: Sequence[dict[str, Any]],
        examples: dict[int, Any],
    ) -> Tensor:
        constants = {k: v for k, v in choices[0].items() if k not in ("num_warps", "num_stages")} | self.tile
        out = torch.full(output[0], torch.nan, dtype=output[1])
        operands = dict(zip(self.names, map(Operand.of, inputs), strict=False))
        kernel = rendering.plain(template, operands, Operand.of(out), constants)
        kernel[grid](*inputs, out)
        return out
