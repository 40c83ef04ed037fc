"""What the operators of lowered graphs will launch by themselves, compiled while Inductor compiles the rest.

Inductor's own kernels and our templates are compiled by its workers; kernels that an operator launches would be
compiled at the first slow step, one after the other. Imports kernels, operators and base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from sfi_compile.compat.dynamo import example
from sfi_compile.kernels import launching
from sfi_compile.ops import device
from sfi_compile.passes.base import Work

DEVICE = "cuda"
_LAUNCHING: dict[Any, Callable[..., None]] = {
    torch.ops.sfi.refresh_rows.default: device.refresh_rows,
    torch.ops.sfi.append_rows.default: device.append_rows,
}


def kernels_compiled(work: Work) -> AbstractContextManager[None]:
    """Inside, another thread compiles those kernels."""
    return launching.ahead(calls(work))


def calls(work: Work) -> list[tuple[torch.device, Callable[[], None]]]:
    """The operators' bodies, with descriptions of their operands, by device; of sites that are alike, one."""
    found: dict[str, tuple[torch.device, Callable[[], None]]] = {}
    for module in work.variants:
        for node in module.graph.nodes:
            body = _LAUNCHING.get(node.target)
            values = [example(n) for n in node.all_input_nodes]
            if body is None or not all(isinstance(v, FakeTensor) and v.device.type == DEVICE for v in values):
                continue
            args: tuple[Any, ...] = fx.map_arg(node.args, lambda n: launching.described(example(n)))
            kind = str(fx.node.map_aggregate(args, _kind))
            where = values[0].device
            found.setdefault(f"{node.target} {where} {kind}", (where, functools.partial(body, *args)))
    return list(found.values())


def _kind(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x
