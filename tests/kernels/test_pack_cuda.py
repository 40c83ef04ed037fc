"""Packing for CUDA without a GPU: interpreted, against the plain form; and compiled."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from sfi_compile.kernels import pack_cuda, support
from sfi_compile.ops.status import RowStatus
from tests.kernels.triton_tools import TARGETS, interpreted, needs_triton

pytestmark = needs_triton


def test_packs_the_rows_that_refresh() -> None:
    g = torch.Generator().manual_seed(0)
    batch, heads, n, sink, chosen, slots = 4, 2, 30, 3, 7, 21
    slow, status = torch.tensor([True, False, True, True]), torch.tensor([0, 0, int(RowStatus.SHORT), 0])
    refreshes = [0, 3]
    k = torch.randn(batch, n, heads, 6, generator=g).transpose(1, 2)  # not contiguous
    v = torch.randn(batch, heads, n, 5, generator=g)
    frame = torch.randint(-1, n, (batch, slots), generator=g)
    selected = torch.randint(0, n - 1, (batch, heads, chosen), generator=g).sort(-1).values
    selected[0, 1, 4:] = -1
    frame[frame == n - 1] = -1
    k[:, :, n - 1], v[:, :, n - 1] = math.nan, math.nan  # what nobody holds
    k[1:3], v[1:3] = math.nan, math.nan
    before = [torch.full((batch, heads, slots), 99), torch.full((batch, heads, slots, 6), 99.0)]
    before.append(torch.full((batch, heads, slots, 5), 99.0))
    held, mem_k, mem_v = interpreted(_pack, k, v, selected, frame, slow, status, sink, *before)
    expected = [x.clone() for x in before]
    for b in refreshes:
        expected[0][b] = frame[b]
        expected[0][b, :, sink : sink + chosen] = selected[b]
        support.copy_rows(expected[0][b], (k[b], expected[1][b]), (v[b], expected[2][b]))
    for found, right in zip((held, mem_k, mem_v), expected, strict=True):
        assert torch.equal(found, right)


def test_packs_several_sites_at_once() -> None:
    g = torch.Generator().manual_seed(0)
    n, sink, chosen, slots = 30, 3, 7, 21
    flags = torch.tensor([True, False]), torch.tensor([0, 0])
    frame = torch.randint(-1, n, (2, slots), generator=g)
    sites = []
    for _ in range(3):
        k, v = (torch.randn(2, 2, n, width, generator=g) for width in (6, 5))
        selected = torch.randint(0, n, (2, 2, chosen), generator=g).sort(-1).values
        memory = [torch.full((2, 2, slots), 99), *(torch.full((2, 2, slots, width), 99.0) for width in (6, 5))]
        sites.append((k, v, selected, memory))
    blank = copy.deepcopy(sites)
    found = interpreted(_pack_all, sites, frame, *flags, sink)
    for (k, v, selected, memory), of_site in zip(blank, found, strict=True):
        alone = interpreted(_pack, k, v, selected, frame, *flags, sink, *memory)
        assert all(map(torch.equal, of_site, alone))
        assert [bool((of_site[0][b] == 99).all()) for b in range(2)] == [False, True]


def _pack_all(
    sites: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]], frame: Tensor, slow: Tensor, status: Tensor, sink: int
) -> list[list[Tensor]]:
    k, v, selected, memory = zip(*sites, strict=True)
    held, mem_k, mem_v = zip(*memory, strict=True)
    pack_cuda.pack_rows(k, v, torch.stack(selected), frame, slow, status, sink, held, mem_k, mem_v)
    return list(memory)


def _pack(*arguments: Tensor) -> tuple[Tensor, ...]:
    """Of one site. Writes into copies, which come back from the other process."""
    k, v, selected, *shared, held, mem_k, mem_v = arguments
    pack_cuda.pack_rows([k], [v], selected[None], *shared, [held], [mem_k], [mem_v])  # type: ignore[arg-type]
    return held, mem_k, mem_v


def test_packing_refuses_a_memory_that_is_not_contiguous() -> None:
    k, memory = torch.zeros(1, 2, 4, 3), torch.zeros(1, 5, 2, 3).transpose(1, 2)
    index, flags = torch.zeros(1, 2, 5, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mem_k has strides .* allowed: contiguous"):
        pack_cuda.pack_rows(
            [k], [k], index[None, :, :, :2], index[:, 0], flags, flags.long(), 1, [index], [memory], [memory]
        )


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", TARGETS)
def test_packing_compiles_without_spills(capability: int) -> None:
    from sfi_compile.kernels import triton_addresses, triton_pack
    from tests.kernels.triton_launches import recorded

    k, index = meta(4, 8, 4096, 128, dtype=torch.bfloat16), meta(4, 8, 1828, dtype=torch.int64)
    memory, flags = meta(4, 8, 1828, 128, dtype=torch.bfloat16), meta(4, dtype=torch.bool)
    with recorded(triton_addresses, "put"), recorded(triton_pack, "pack", "append") as launches:
        selected = meta(3, 4, 8, 1536, dtype=torch.int64)
        rows, sites = (index[:, 0], flags, index[:, 0, 0], 4), ([index] * 3, [memory] * 3, [memory] * 3)
        pack_cuda.pack_rows([k] * 3, [k] * 3, selected, *rows, *sites)
        pack_cuda.append_rows(k, k, flags, index[0, 0, :3], index[:, 0, 0], 1795, index, memory, memory)
    assert [launch.usage(capability).spilled for launch in launches] == [0, 0]
