"""The selector on CUDA: all rows and KV heads of several sites in eight launches, for `sfi::refresh_rows`.

The formulas are `selector.py`'s, in float32 and in logs. Nothing is read on the host, so that CUDA graphs can hold it;
rows that do not refresh cost empty programs, and work grows with what may be attended to, not with what is allocated.
The same input gives the same bits, whatever the other rows are. Imports torch and `sfi_compile.config`; triton at the
first call only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sfi_compile.config import SelectorSpec
from sfi_compile.kernels import addresses, top_k_cuda
from sfi_compile.kernels.heuristics import power_of_two
from sfi_compile.kernels.launching import launch

PARTIALS = 8


@dataclasses.dataclass(frozen=True)
class Tiles(top_k_cuda.Tiles):
    """How the work is cut up; powers of two. The sums' order, so the last bits, depend on `evidence` and `merged`."""

    evidence: int = 1024
    """Positions that a program turns into evidence, of one head."""
    evidence_rows: int = 4
    """Rows of logits that it holds at once."""
    evidence_warps: int = 4
    """Warps of such a program."""
    evidence_chunks: int = 4
    """How often it does so."""
    evidence_stages: int = 3
    """How many chunks it holds or reads at once."""
    merged: int = 128
    """Chunks of evidence whose sums are added at once."""
    refine: int = 2048
    """Positions times heads that a program refines."""
    refine_least: int = 128
    """Fewest positions of them."""
    refine_lanes: int = 512
    """Positions times heads for each warp."""


def select_rows(
    logits: Sequence[Tensor],
    lse: Sequence[Tensor],
    log_norm: Sequence[Tensor],
    slow_rows: Tensor,
    status: Tensor,
    extent: Tensor,
    log_position: Tensor,
    spec: SelectorSpec,
    most: int | None = None,
    tiles: Tiles = Tiles(),
) -> Tensor:
    """Evidence → selection, for the slow rows that are ready for a memory.

    L sites of the same shapes and under the same mask, B rows, H KV heads, R evidence rows (query heads of a group
    times queries), N positions, a multiple of 16 if whole vectors are to be loaded. Whatever belongs to rows that do
    not refresh, or lies past a row's extent, may be anything.

    Args:
        logits: of each site, float32 [B, H, R, N], last stride 1; -inf where masked.
        lse: of each site, contiguous float32 [B, H, R], log-sum-exp of each row of logits (without sinks); -inf for a
            query that may attend to nothing: it prefers no token.
        log_norm: of each site, contiguous float32 [B, H, N], `log(max(‖k‖, 1e-6))`; may be anything off the candidates.
        slow_rows: bool [B].
        status: int64 [B] of `RowStatus`.
        extent: int64 [B, 3], of `sfi::frame`; the second is one past the last position that may be attended to.
        log_position: float32 [B, N or fewer], of `sfi::frame`: -inf off the candidates.
        spec: the selector's numbers.
        most: positions to select, at most N; None: `k_head`, or N if that is less.
        tiles: how to cut up the work.

    Returns:
        int64 [L, B, H, most], ascending; ties go to the lower position; -1 for unused slots, which come last,
        and in rows that do not refresh. Candidates whose evidence is zero with every query rank last.

    Raises:
        ImportError: triton is missing.
        ValueError: the last stride of the logits is not 1, or sites differ in strides.
    """
    from sfi_compile.kernels import triton_scores as scores

    strides = top_k_cuda.strides_of(logits)
    log_position, extent = log_position.contiguous(), extent.contiguous()
    sites, (batch, heads, rows, size) = len(logits), logits[0].shape
    every = sites * batch
    k = min(spec.k_head, size) if most is None else most
    device = logits[0].device
    chunks = -(-size // tiles.evidence)
    # By how far a neighbour suppresses, and how positions and heads are tiled for it.
    radius = min(spec.nms_window // 2, size - 1) if spec.nms_alpha else 0
    block_h = power_of_two(heads)
    block = max(tiles.refine // block_h, tiles.refine_least)
    narrow = 4 * radius <= block
    stretches = -(-size // (block - 2 * radius if narrow else block))
    # Arrays of [L * B, H, N] serve in turn: the mean, then the keys of the list; the keys; scores, then its positions.
    mean, refined = torch.empty(2, every, heads, size, dtype=torch.float32, device=device)
    staged = heads * block + block_h * block // 4
    log_s = torch.empty(every, stretches, staged, dtype=torch.float32, device=device)
    keys, list_key, list_at = (x.view(torch.int32) for x in (refined, mean, log_s))
    partials = torch.empty(every, heads, chunks, PARTIALS, dtype=torch.float32, device=device)
    weights = torch.empty(every, 2, heads, dtype=torch.float32, device=device)
    counts = top_k_cuda.Counts.empty(every * heads, size, tiles, device)
    which = (slow_rows, status, extent)
    arithmetic = {"heads": heads, "fast": device.type != "cpu"}

    norm_scale = spec.norm_weight * spec.norm_gamma
    inputs = addresses.table([*logits, *lse, *log_norm])
    sizes = (batch, sites, size, log_position.shape[1])
    launch(
        scores.evidence, (-(-chunks // tiles.evidence_chunks), heads, every),
        inputs.addresses, log_position, *which, mean, partials, counts.bins, counts.listed,
        *sizes, chunks, *strides, norm_scale, spec.alpha, 1.0 / (spec.alpha or 1.0),
        rows=rows, block_r=min(power_of_two(rows), tiles.evidence_rows), block=tiles.evidence,
        geometric=spec.alpha == 0, n_bins=top_k_cuda.BINS, aligned=inputs.aligned, **arithmetic,
        per=tiles.evidence_chunks, stages=tiles.evidence_stages, num_warps=tiles.evidence_warps,
    )  # fmt: skip
    clip = spec.lambda_clip if rows == 1 else spec.lambda_clip_multi
    launch(
        scores.weigh, (heads, every),
        partials, *which, weights, batch, chunks, heads, clip, chunk=tiles.evidence, block_c=tiles.merged,
        num_warps=1,
    )  # fmt: skip
    fusing = (mean, inputs.addresses, log_position, weights, *which)
    refining = (spec.nms_alpha, spec.exclusivity_alpha, 1.0 / spec.exclusivity_temperature)
    shape = {"block": block, "block_h": block_h, "num_warps": min(max(block * block_h // tiles.refine_lanes, 1), 16)}
    exclusive = heads > 2 and spec.exclusivity_alpha > 0
    if narrow:
        launch(
            scores.refine, (stretches, every),
            *fusing, log_s, keys, *sizes, norm_scale, *refining,
            radius=radius, exclusive=exclusive, aligned=inputs.aligned, **shape, **arithmetic,
        )  # fmt: skip
    else:
        launch(
            scores.blend, (stretches, every),
            *fusing, log_s, *sizes, norm_scale, aligned=inputs.aligned, **shape, **arithmetic,
        )  # fmt: skip
        peak, ahead, behind, reach = log_s, refined, mean, 0
        while reach < radius:
            by = min(2 * reach + 1, radius - reach)
            launch(
                scores.widen, (chunks, heads, every),
                peak, ahead, *which, batch, size, heads, by, block=tiles.evidence, num_warps=4,
            )  # fmt: skip
            peak, ahead, behind, reach = ahead, behind, ahead, reach + by
        launch(
            scores.refine_wide, (stretches, every),
            log_s, peak, log_position, *which, keys, batch, *sizes[2:], *refining, exclusive=exclusive, **shape,
            **arithmetic,
        )  # fmt: skip
    return top_k_cuda.choose(keys, which, counts, (list_key, list_at), sites, k, tiles)
