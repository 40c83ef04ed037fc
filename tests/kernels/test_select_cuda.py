"""The selector for CUDA without a GPU: interpreted, against oracle and plain form; and compiled.

What must not be read holds NaN: rows that do not refresh, what lies past a row's extent, keys that are no candidates.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sfi_compile.config import SelectorSpec
from sfi_compile.kernels import reference, select_cuda, selector, top_k_cuda
from sfi_compile.kernels.select_cuda import Tiles
from sfi_compile.ops.status import RowStatus
from tests.kernels.test_selector import Case, chosen_of, score_error, spec_with
from tests.kernels.triton_tools import TARGETS, interpreted, needs_triton

pytestmark = needs_triton
INF = math.inf
SMALL = Tiles(evidence=32, merged=2, refine=128, refine_least=32, sample=16, choose=32, listed=64, written=16)
"""So that a short context has several chunks of everything."""


@dataclasses.dataclass
class Row:
    """One row of a batch: the oracle's view of it, and how far it goes."""

    case: Case
    refreshes: bool = True
    dead: tuple[int, ...] = ()
    """Rows of logits whose query may attend to nothing."""

    @property
    def extent(self) -> int:
        """One past the last position allowed, at least 1."""
        return max(1, int((self.case.allowed * torch.arange(1, len(self.case.allowed) + 1)).max()))

    def seen(self) -> Case:
        """What the oracle is to be asked: a query without preference has equal logits."""
        logits = self.case.logits.clone()
        logits[:, list(self.dead)] = torch.zeros(len(self.case.allowed)).masked_fill(~self.case.allowed, -INF)
        return dataclasses.replace(self.case, logits=logits)


def row_of(
    seed: int, heads: int, rows: int, n: int, spec: SelectorSpec, extent: int | None = None, kind: str = "normal"
) -> Row:
    g = torch.Generator().manual_seed(seed)
    logits, keys = 3 * torch.randn(heads, rows, n, generator=g), torch.randn(heads, n, 8, generator=g)
    if kind == "equal":
        logits, keys = torch.full_like(logits, 1.3), torch.ones_like(keys)
    elif kind == "quantised":
        logits, keys = (logits / 2).round(), torch.ones_like(keys)
    elif kind == "dominant":
        logits[..., n // 2] += 40
    elif kind == "huge":
        logits *= 3e3
    allowed = torch.arange(n) < (n if extent is None else extent)
    logits = logits.masked_fill(~allowed, -INF)
    return Row(Case(logits, keys, allowed, int(allowed.sum()) - 1, spec))


def operands(rows: list[Row]) -> list[Tensor]:
    """Arguments of `select_rows` before the spec."""
    batch, n = len(rows), len(rows[0].case.allowed)
    heads, queries = rows[0].case.logits.shape[:2]
    logits, lse = torch.full((batch, heads, queries, n), math.nan), torch.full((batch, heads, queries), math.nan)
    log_norm, log_position = torch.full((batch, heads, n), math.nan), torch.full((batch, n), math.nan)
    slow, status = torch.zeros(batch, dtype=torch.bool), torch.zeros(batch, dtype=torch.int64)
    extent = torch.full((batch, 3), -77, dtype=torch.int64)
    for b, row in enumerate(rows):
        slow[b] = row.refreshes
        if not row.refreshes:
            # Rows of both kinds: fast, and slow but not ready.
            slow[b], status[b] = b % 2 == 0, int(RowStatus.AHEAD) if b % 2 == 0 else 0
            continue
        case, end = row.case, row.extent
        extent[b] = torch.tensor([end, end, 0])
        logits[b, ..., :end] = case.logits[..., :end]
        logits[b, :, list(row.dead), :end] = -INF
        lse[b] = logits[b, ..., :end].logsumexp(-1)
        log_norm[b] = case.keys.norm(dim=-1).clamp_min(1e-6).log().masked_fill(~case.cand, math.nan)
        log_position[b] = selector.log_position(case.cand, case.spec)
    return [logits, lse, log_norm, slow, status, extent, log_position]


def selected_of(rows: list[Row], tiles: Tiles = SMALL) -> Tensor:
    return interpreted(_select, operands(rows), rows[0].case.spec, tiles)


def _select(arguments: list[Tensor], spec: SelectorSpec, tiles: Tiles) -> Tensor:
    """Of one site."""
    own, shared = arguments[:3], arguments[3:]
    return select_cuda.select_rows(*([x] for x in own), *shared, spec, tiles=tiles)[0]  # type: ignore[arg-type, misc]


def assert_selected(rows: list[Row], found: Tensor) -> None:
    """The oracle's positions, except where scores are closer to the k-th than two of them may be off together."""
    heads, n = rows[0].case.logits.shape[0], len(rows[0].case.allowed)
    k = min(rows[0].case.spec.k_head, n)
    assert found.dtype == torch.int64
    assert found.shape == (len(rows), heads, k)
    for row, of_row in zip(rows, found, strict=True):
        if not row.refreshes:
            assert (of_row == -1).all()
            continue
        case = row.seen()
        scores = reference.score(case.logits, case.keys, case.allowed, case.cand, case.spec)
        for of_head, score, error in zip(of_row, scores, score_error(case), strict=True):
            chosen, right = chosen_of(of_head), reference.best(score, case.cand, case.spec.k_head)
            assert len(chosen) == len(right)
            assert case.cand[chosen].all()
            disputed = sorted(set(chosen) ^ set(right))
            if disputed:
                kth = score[right].min()
                assert ((score[disputed] - kth).abs() <= 2 * error.max()).all(), f"{disputed} against {right}"


# Selection


def test_rows_of_all_kinds_in_one_batch() -> None:
    spec, n = spec_with(k_head=9), 49
    rows = [
        row_of(0, 3, 2, n, spec),
        row_of(1, 3, 2, n, spec, kind="quantised"),
        Row(row_of(2, 3, 2, n, spec).case, refreshes=False),
        Row(row_of(3, 3, 2, n, spec).case, refreshes=False),
        row_of(4, 3, 2, n, spec, extent=33, kind="dominant"),
        row_of(5, 3, 2, n, spec, extent=12),  # fewer candidates than k
        row_of(6, 3, 2, n, spec, extent=1),  # no candidates
    ]
    rows[0].dead = (1,)
    found = selected_of(rows)
    assert_selected(rows, found)
    # Bit for bit, whatever the other rows are.
    assert torch.equal(selected_of(rows[4:5]), found[4:5])


@pytest.mark.parametrize(
    ("heads", "queries", "changes"),
    [
        (1, 32, {"k_head": 1}),
        (2, 5, {"k_head": 60, "alpha": 0.0}),
        (8, 1, {"k_head": 7, "nms_window": 7}),
        (3, 3, {"k_head": 7, "nms_window": 2, "nms_alpha": 0.5, "lambda_clip_multi": 1.0}),
        (3, 2, {"k_head": 7, "nms_window": 0, "lambda_clip_multi": 0.0}),
        (3, 2, {"k_head": 7, "nms_window": 30}),  # too wide for one tile
        (5, 2, {"k_head": 7, "exclusivity_alpha": 0.0, "preset": "paper-quality"}),
    ],
)
def test_shapes_and_settings(heads: int, queries: int, changes: dict[str, float]) -> None:
    rows = [row_of(heads, heads, queries, 43, spec_with(**changes))]
    assert_selected(rows, selected_of(rows))


def test_ends_at_the_edges_of_chunks() -> None:
    spec = spec_with(k_head=5)
    rows = [row_of(b, 1, 1, 66, spec, extent=end) for b, end in enumerate((31, 32, 33, 63, 64, 65))]
    assert_selected(rows, selected_of(rows))


def test_equal_scores_choose_the_first_candidates() -> None:
    spec = spec_with(norm_weight=0, position_weight=0, sink=3, recent=1, k_head=40)
    found = selected_of([row_of(0, 3, 2, 70, spec, kind="equal")])
    assert found.tolist() == [[list(range(3, 43))] * 3]


def test_huge_logits_and_a_position_masked_for_one_query() -> None:
    spec = spec_with(k_head=6)
    row = row_of(1, 1, 2, 40, spec, kind="huge")
    row.case.logits[:, 0, 7:20] = -INF
    assert_selected([row], selected_of([row]))


def test_evidence_that_is_nothing_everywhere_chooses_the_first_candidates() -> None:
    """The queries attend to sinks or recent tokens only: no score is above another, and none is NaN."""
    spec = spec_with(k_head=4, sink=2, recent=3)
    row = row_of(1, 3, 2, 40, spec)
    row.case.logits[1, :, 2:37] = -INF
    found = selected_of([row])[0]
    assert found[1].tolist() == [2, 3, 4, 5]
    assert all(len(chosen_of(of_head)) == 4 for of_head in found)


def _select_all(sites: list[list[Tensor]], spec: SelectorSpec, tiles: Tiles) -> Tensor:
    own = [[site[i] for site in sites] for i in range(3)]
    return select_cuda.select_rows(*own, *sites[0][3:], spec, tiles=tiles)


@pytest.mark.parametrize("window", [4, 30])
def test_several_sites_at_once_are_each_of_them_alone(window: int) -> None:
    """Bit for bit, with rows of all kinds, in tensors that lie anywhere and with a site whose keys are all equal."""
    spec, n = spec_with(k_head=9, nms_window=window), 49
    sites = []
    for seed, kind in enumerate(("normal", "quantised", "equal", "dominant")):
        rows = [row_of(3 * seed + b, 3, 2, n, spec, extent=(49, 20, 33)[b], kind=kind) for b in range(3)]
        rows[1].refreshes = False
        sites.append(operands(rows))
    for site in sites:
        site[3:] = sites[0][3:]  # one mask
    found = interpreted(_select_all, sites, spec, SMALL)
    assert found.shape == (4, 3, 3, 9)
    assert all(
        torch.equal(of_site, interpreted(_select, site, spec, SMALL))
        for site, of_site in zip(sites, found, strict=True)
    )
    assert len({tuple(of_site.flatten().tolist()) for of_site in found}) == 4


def test_sites_of_different_strides_are_refused() -> None:
    spec = spec_with(k_head=9)
    one, other = (operands([row_of(0, 3, 2, 49, spec)]) for _ in range(2))
    other[0] = other[0].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"logits have strides .* allowed: the same at all sites"):
        _select_all([one, other], spec, SMALL)


def sampled(n: int) -> Tensor:
    """Which positions are in the sample: of eight runs of eight positions, one. Bool [n]."""
    t = torch.arange(n)
    group = t // 64
    return (t // 8) % 8 == (group * 5 + (group // 8) * 3) % 8


def test_a_sample_that_misleads_costs_time_only() -> None:
    """The sampled positions have the highest scores, so that the rest of the k best are not in the ranges expected."""
    n = 448
    spec = spec_with(k_head=200, nms_window=0, norm_weight=0, position_weight=0, sink=0, recent=1)
    row = row_of(3, 1, 1, n, spec)
    row.case.logits[0, 0] += 30.0 * sampled(n)
    tiles = dataclasses.replace(SMALL, evidence=64, refine=256, choose=64, listed=256)
    assert top_k_cuda.sample_rank(spec.k_head) > int(sampled(n).sum()) > spec.k_head // top_k_cuda.SAMPLED
    found = interpreted(_select_with_a_small_sample, operands([row]), spec, tiles)
    assert_selected([row], found)


def _select_with_a_small_sample(arguments: list[Tensor], spec: SelectorSpec, tiles: Tiles) -> Tensor:
    """With no allowance for chance."""
    before = top_k_cuda.sample_rank
    top_k_cuda.sample_rank = lambda k: k // top_k_cuda.SAMPLED  # type: ignore[assignment]
    try:
        return _select(arguments, spec, tiles)
    finally:
        top_k_cuda.sample_rank = before


@pytest.mark.parametrize("window", [2, 4, 7])
def test_keys_past_the_extent_are_written_also_where_a_tile_ends_there(window: int) -> None:
    """Of a row of whole vectors, of which the last is not full; memory that nobody wrote would be the best of keys."""
    spec = spec_with(k_head=9, nms_window=window, sink=0, recent=1)
    width = max(SMALL.refine // 4, SMALL.refine_least) - 2 * (window // 2)  # that a tile goes on by, with three heads
    n = next(n for n in range(3 * width, 0, -width) if n % 16)
    row = row_of(5, 3, 2, n, spec)
    given = operands([row])
    for i in (0, 2):
        given[i] = torch.nn.functional.pad(given[i], (0, -n % 16), value=math.nan)
    found = interpreted(_select_over_poison, given, spec, n)
    assert_selected([row], found)


def _select_over_poison(arguments: list[Tensor], spec: SelectorSpec, n: int) -> Tensor:
    empty = torch.empty

    def poisoned(*shape: Any, **how: Any) -> Tensor:
        made = empty(*shape, **how)
        return made.fill_(1e30 if made.is_floating_point() else 2**30)

    torch.empty = poisoned  # type: ignore[assignment]
    try:
        own, shared = arguments[:3], arguments[3:]
        return select_cuda.select_rows(*([x] for x in own), *shared, spec, min(spec.k_head, n), SMALL)[0]  # type: ignore[arg-type, misc]
    finally:
        torch.empty = empty


def test_rows_are_ready_as_the_operators_say() -> None:
    from sfi_compile.kernels import triton_positions, triton_scores, triton_top_k

    assert triton_positions.READY.value == int(RowStatus.READY)
    assert (triton_top_k.BINS.value, triton_scores.PARTIALS.value) == (top_k_cuda.BINS, select_cuda.PARTIALS)


# Compiled


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def select_meta(heads: int, queries: int, n: int, spec: SelectorSpec) -> Tensor:
    flags = (meta(4, dtype=torch.bool), meta(4, dtype=torch.int64), meta(4, 3, dtype=torch.int64))
    logits, lse, log_norm = meta(4, heads, queries, n), meta(4, heads, queries), meta(4, heads, n)
    return select_cuda.select_rows([logits] * 3, [lse] * 3, [log_norm] * 3, *flags, meta(4, n), spec)


SCORES, TOP_K = "evidence weigh refine blend widen refine_wide".split(), "sample gather threshold write".split()
SITES = {
    "published": (8, 4, 32768, {}),
    "many heads": (32, 1, 131072, {}),
    "wide": (8, 8, 8192, {"nms_window": 4000, "alpha": 0.0}),
}


@pytest.mark.parametrize(
    ("name", "capability"), [*(("published", x) for x in TARGETS), ("many heads", 90), ("wide", 90)]
)
def test_selection_compiles_without_spills(name: str, capability: int) -> None:
    from sfi_compile.kernels import triton_addresses, triton_scores, triton_top_k
    from tests.kernels.triton_launches import recorded

    heads, queries, n, changes = SITES[name]
    with (
        recorded(triton_addresses, "put") as put,
        recorded(triton_scores, *SCORES) as scores,
        recorded(triton_top_k, *TOP_K) as top_k,
    ):
        found = select_meta(heads, queries, n, spec_with(**{"k_head": 1536, "nms_window": 32, **changes}))
    assert found.shape == (3, 4, heads, 1536)
    launches = [*put, *scores, *top_k]
    by_name = {launch.kernel.__name__: launch for launch in launches}
    if name == "published":
        assert list(by_name) == "put evidence weigh refine sample gather threshold write".split()
        assert len(launches) == 8
    else:
        # What the shape changes.
        by_name = {key: x for key, x in by_name.items() if key not in ("put", "sample", "gather", "write")}
    for launch in by_name.values():
        used = launch.usage(capability)
        assert used.spilled == 0, launch.kernel.__name__
        assert used.registers * 32 * launch.kwargs["num_warps"] <= 65_536
