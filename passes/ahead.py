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
from torch import fx

from sfi_compile.compat.dynamo import example
from sfi_compile.kernels import launching
from sfi_compile.ops import device
from sfi_compile.passes.base import Work
from sfi_compile.passes.shapes import description

_LAUNCHING: dict[Any, Callable[..., None]] = {
    torch.ops.sfi.refresh_rows.default: device.refresh_rows,
    torch.ops.sfi.append_rows.default: device.append_rows,
}


def kernels_compiled(work: Work) -> AbstractContextManager[None]:
    """Inside, another thread compiles those kernels."""
    return launching.ahead(calls(work))


def calls(work: Work, device_type: str = "cuda") -> list[tuple[torch.device, Callable[[], None]]]:
    """The operators' bodies, with descriptions of their operands, by device; of sites that are alike, one."""
    found: dict[str, tuple[torch.device, Callable[[], None]]] = {}
    for module in work.variants:
        for node in module.graph.nodes:
            body = _LAUNCHING.get(node.target)
            if body is None or example(node.all_input_nodes[0]).device.type != device_type:
                continue
            kind = f"{node.target} {fx.map_arg(node.args, description)}"
            if kind not in found:
                args: tuple[Any, ...] = fx.map_arg(node.args, lambda n: launching.described(example(n)))
                found[kind] = example(node.all_input_nodes[0]).device, functools.partial(body, *args)
    return list(found.values())
