"""Packing and appending on CUDA: a launch each for all rows, for `sfi::pack` and `sfi::append`.

Nothing is read on the host, so that CUDA graphs can hold it. Imports torch; triton at the first call only.
"""

from __future__ import annotations

from torch import Tensor

from sfi_compile.kernels.heuristics import power_of_two

BYTES = 8192
"""What a program copies at once, of keys or of values."""


def pack_rows(
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    frame: Tensor,
    slow_rows: Tensor,
    status: Tensor,
    sink: int,
    held: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
) -> None:
    """Write the new support and its keys and values into the memory of the slow rows that are ready for one.

    Of other rows nothing is read and nothing written. An empty slot (-1) becomes zero, because what a position that
    nobody may attend to holds can be anything, NaN included.

    Args:
        k: [B, H, N, Dk], of any strides.
        v: [B, H, N, Dv], of any strides.
        selected: int64 [B, H, k_head].
        frame: int64 [B, S]: the support but for the selected tokens, of `sfi::frame`.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        sink: first slot of the selected tokens.
        held: int64 [B, H, S], written: position in each slot, -1 for empty.
        mem_k: [B, H, S, Dk], contiguous, written.
        mem_v: [B, H, S, Dv], contiguous, written.

    Raises:
        ImportError: triton is missing.
        ValueError: what is written is not contiguous.
    """
    from sfi_compile.kernels import triton_pack as source

    for name, x in (("held", held), ("mem_k", mem_k), ("mem_v", mem_v)):
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}; allowed: contiguous")
    batch, heads, slots = held.shape
    widest = max(k.shape[-1], v.shape[-1]) * k.element_size()
    # Parts of rows of at most 256 bytes, which is what a cache line or two hold.
    block_d = power_of_two(min(widest, 256) // k.element_size())
    block_s = max(BYTES // (block_d * k.element_size()), 1)
    source.pack[-(-slots // block_s), heads, batch](
        k, v, selected.contiguous(), frame.contiguous(), slow_rows, status, held, mem_k, mem_v,
        heads, slots, sink, selected.shape[-1], k.shape[-1], v.shape[-1], *k.stride(), *v.stride(),
        block_s=block_s, block_d=block_d, num_warps=4,
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
    source.append[position.shape[0], heads, batch](
        k, v, slow_rows, position, refreshed_at, held, mem_k, mem_v,
        heads, slots, offset, k.shape[-1], v.shape[-1], position.stride(0), *k.stride(), *v.stride(),
        block_d=block_d, num_warps=1,
    )  # fmt: skip
