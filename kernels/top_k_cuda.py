"""What selections on CUDA have in common: the k best candidates of every head, from integer keys in the order of their
scores, in four launches.

Whatever scores are made of, their kernels read logits of several sites, and leave keys and empty counts. Imports torch;
triton at the first call only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sfi_compile.kernels.heuristics import power_of_two
from sfi_compile.kernels.launching import launch

BINS = 256
SAMPLED = 8
"""One of so many keys is counted to find where the k-th lies."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut up; powers of two."""

    sample: int = 2048
    """Keys that a program counts, of one head."""
    choose: int = 2048
    """Keys that a program takes from, of one head (less than 2^15)."""
    choose_warps: int = 4
    """Warps of such a program."""
    choose_chunks: int = 8
    """How often it does so."""
    choose_stages: int = 3
    """How many chunks it holds or reads at once."""
    listed: int = 2048
    """Keys of a list that are looked at together."""
    listed_warps: int = 4
    """Warps of such a program."""
    written: int = 256
    """Positions that are written together."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What is counted on the way, int32, for each head of every row of every site."""

    bins: Tensor
    """How many sampled keys are in each range of keys; zeros to begin with."""
    listed: Tensor
    """How many keys are listed; zeros to begin with."""
    cut: Tensor
    segments: Tensor
    before: Tensor

    @classmethod
    def empty(cls, heads: int, size: int, tiles: Tiles, device: torch.device) -> Counts:
        """Of so many heads in all, of so many positions; uninitialised."""
        pieces = -(-size // tiles.choose)
        lengths = [heads * n for n in (BINS, 1, 2, 2 * pieces, 2 * pieces)]
        return cls(*torch.split(torch.empty(sum(lengths), dtype=torch.int32, device=device), lengths))


def strides_of(logits: Sequence[Tensor]) -> tuple[int, int, int]:
    """Strides of rows, KV heads and evidence rows of several sites' logits [B, H, R, N], which one launch reads.

    Raises:
        ValueError: the last stride is not 1, or sites differ in strides.
    """
    strides = {x.stride() for x in logits}
    if len(strides) > 1 or logits[0].stride(-1) != 1:
        raise ValueError(f"logits have strides {strides}; allowed: the same at all sites, with a last one of 1")
    of_row, of_head, of_evidence, _ = logits[0].stride()
    return of_row, of_head, of_evidence


def sample_rank(k: int) -> int:
    """The rank among the sampled keys below which none of the k largest keys are expected.

    Eight standard deviations allow for scores that come in runs. If it is not enough, `threshold` looks at every key.
    """
    return math.ceil(k / SAMPLED + 8 * math.sqrt(k / SAMPLED) + 8)


def choose(
    keys: Tensor,
    which: tuple[Tensor, Tensor, Tensor],
    counts: Counts,
    scratch: tuple[Tensor, Tensor],
    sites: int,
    k: int,
    tiles: Tiles,
) -> Tensor:
    """The positions of the k largest keys.

    Args:
        keys: int32 [L * B, H, N], in the order of the scores; the least of what is no candidate.
        which: slow rows, status and extent, as of `select_cuda.select_rows`.
        counts: with bins and listed zero in rows that refresh.
        scratch: two int32 arrays as large as `keys`.
        sites: L.
        k: at most N.
        tiles: how to cut up the work.

    Returns:
        int64 [L, B, H, k], ascending; ties go to the lower position; -1 for unused slots, and in other rows.
    """
    from sfi_compile.kernels import triton_top_k as source

    every, heads, size = keys.shape
    batch, pieces = every // sites, -(-size // tiles.choose)
    list_key, list_at = scratch
    bins, listed, cut, segments, before = (getattr(counts, f.name) for f in dataclasses.fields(counts))
    selected = torch.empty(sites, batch, heads, k, dtype=torch.int64, device=keys.device)
    wanted = sample_rank(k)
    launch(
        source.sample, (-(-size // (SAMPLED * tiles.sample)), heads, every),
        keys, *which, bins, batch, size, heads, block=tiles.sample, num_warps=4,
    )  # fmt: skip
    launch(
        source.gather, (-(-pieces // tiles.choose_chunks), heads, every),
        keys, *which, bins, listed, segments, list_key, list_at, batch, size, pieces, heads, wanted,
        block=tiles.choose, per=tiles.choose_chunks, stages=tiles.choose_stages, num_warps=tiles.choose_warps,
    )  # fmt: skip
    launch(
        source.threshold, (heads, every),
        keys, *which, bins, listed, segments, list_key, list_at, cut, before, selected,
        batch, size, pieces, heads, k, wanted,
        chunk=tiles.choose, block=tiles.listed, block_c=max(power_of_two(pieces), 32), block_k=1024,
        num_warps=tiles.listed_warps,
    )  # fmt: skip
    launch(
        source.write, (pieces, heads, every),
        *which, segments, list_key, list_at, cut, before, selected, batch, size, pieces, heads, k,
        chunk=tiles.choose, block=tiles.written, num_warps=2,
    )  # fmt: skip
    return selected
