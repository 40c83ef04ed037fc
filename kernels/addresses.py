"""Tables of addresses on the device: one launch for tensors of several sites, which no memory holds side by side.

Written by a kernel, not copied from the host: a CUDA graph holds it, with the tensors that it was captured with.
Imports torch; triton at the first call only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sfi_compile.kernels.launching import launch


@dataclasses.dataclass(frozen=True)
class Table:
    """Where tensors lie."""

    addresses: Tensor
    """int64, in the tensors' order."""
    aligned: bool
    """All are multiples of 16 bytes."""


def table(tensors: Sequence[Tensor]) -> Table:
    """The addresses of some tensors of one device, which must be kept for as long as the table is used.

    Raises:
        ImportError: triton is missing.
    """
    from sfi_compile.kernels import triton_addresses as source

    addresses = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
    launch(source.put, (1,), addresses, tuple(tensors), num_warps=1)
    return Table(addresses, all(x.data_ptr() % 16 == 0 for x in tensors))
