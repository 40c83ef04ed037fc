"""Packing and appending on CUDA, for `sfi::pack` and `sfi::append`: a launch for all rows, packing for several sites.

Nothing is read on the host, so that CUDA graphs can hold it. Imports torch; triton at the first call only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sfi_compile.kernels import addresses
from sfi_compile.kernels.heuristics import power_of_two
from sfi_compile.kernels.launching import launch

BYTES = 8192
"""What a program copies at once, of keys or of values."""


def pack_rows(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    selected: Tensor,
    frame: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    sink: int,
    held: Sequence[Tensor],
    mem_k: Sequence[Tensor],
    mem_v: Sequence[Tensor],
) -> None:
    """Write the new support and its keys and values into the memory of the slow rows that are ready for one, at L sites
    of the same shapes and strides.

    Of other rows nothing is read and nothing written. An empty slot (-1) becomes zero, because what a position that
    nobody may attend to holds can be anything, NaN included.

    Args:
        k: of each site, [B, H, N, Dk], of any strides.
        v: of each site, [B, H, N, Dv], of any strides.
        selected: contiguous int64 [L, B, H, k_head].
        frame: int64 [B, S]: the support but for the selected tokens, of `sfi::frame`.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        sink: first slot of the selected tokens.
        held: of each site, int64 [B, H, S], contiguous, written: position in each slot, -1 for empty.
        mem_k: of each site, [B, H, S, Dk], contiguous, written.
        mem_v: of each site, [B, H, S, Dv], contiguous, written.

    Raises:
        ImportError: triton is missing.
        ValueError: what is written is not contiguous, or sites differ in strides.
    """
    from sfi_compile.kernels import triton_pack as source

    for name, tensors in (("held", held), ("mem_k", mem_k), ("mem_v", mem_v)):
        for x in tensors:
            if not x.is_contiguous():
                raise ValueError(f"{name} has strides {x.stride()}; allowed: contiguous")
    for name, tensors in (("k", k), ("v", v)):
        if len({x.stride() for x in tensors}) > 1:
            raise ValueError(f"{name} has strides {[x.stride() for x in tensors]}; allowed: the same at all sites")
    batch, heads, slots = held[0].shape
    key_dim, value_dim = k[0].shape[-1], v[0].shape[-1]
    itemsize = k[0].element_size()
    # Parts of rows of at most 256 bytes, which is what a cache line or two hold.
    block_d = power_of_two(min(max(key_dim, value_dim) * itemsize, 256) // itemsize)
    block_s = max(BYTES // (block_d * itemsize), 1)
    where = addresses.table([*k, *v, *held, *mem_k, *mem_v])
    launch(
        source.pack, (-(-slots // block_s), heads, batch * len(k)),
        where.addresses, k[0], selected, frame.contiguous(), slow_rows, status,
        batch, len(k), heads, slots, sink, selected.shape[-1], key_dim, value_dim, *k[0].stride(), *v[0].stride(),
        aligned=where.aligned, block_s=block_s, block_d=block_d, num_warps=4,
    )  # fmt: skip


def append_rows(
    k: Tensor,
    v: Tensor,
    slow_rows: Tensor,
    position: Tensor,
    refreshed_at: Tensor,
    offset: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Append this step's tokens to the recent segment of every row that is not slow.

    Args:
        k: [B, H, N, Dk], of any strides; holds this step's keys already, as does v.
        v: [B, H, N, Dv], of any strides.
        slow_rows: bool [B].
        position: int64 [Q], ascending.
        refreshed_at: int64 [B].
        offset: slot of the token of the refresh.
        held: int64 [B, H, S], contiguous, written, as are the next two.
        mem_k: [B, H, S, Dk].
        mem_v: [B, H, S, Dv].

    Raises:
        ImportError: triton is missing.
    """
    from sfi_compile.kernels import triton_pack as source

    batch, heads, slots = held.shape
    block_d = power_of_two(max(k.shape[-1], v.shape[-1]), 16)
    launch(
        source.append, (position.shape[0], heads, batch),
        k, v, slow_rows, position, refreshed_at, held, mem_k, mem_v,
        heads, slots, offset, k.shape[-1], v.shape[-1], position.stride(0), *k.stride(), *v.stride(),
        block_d=block_d, num_warps=1,
    )  # fmt: skip
