"""Selection by attention alone, for CUDA without a GPU: interpreted, against the oracle; and compiled.

What must not be read holds NaN: rows that are not slow, what lies past a row's extent, histories that begin, norms of
what nobody attends to.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from sfi_compile.kernels import attended_cuda, reference, top_k_cuda
from sfi_compile.kernels.attended_cuda import Tiles
from sfi_compile.ops.status import RowStatus
from sfi_compile.policies import Attended
from tests.kernels.triton_tools import TARGETS, interpreted, needs_triton

pytestmark = needs_triton
INF = math.inf
SMALL = Tiles(add=32, add_rows=2, add_chunks=2, carry=16, sample=16, choose=32, listed=64, written=16)
"""So that a short context has several chunks of everything."""
REACH = Attended(fading=0.9, by_value=True, weight=0.3, ahead=5, decay=0.8)
SIZE, PADDED, SINK, RECENT = 100, 112, 2, 6


@dataclasses.dataclass
class Row:
    """One row of one site: float64 results are the oracle's."""

    logits: Tensor
    values: Tensor
    past: Tensor
    extent: int
    slow: bool = True
    status: int = int(RowStatus.READY)
    since: int = 3

    @property
    def allowed(self) -> Tensor:
        """What may be attended to."""
        return torch.arange(SIZE) < self.extent

    @property
    def candidates(self) -> Tensor:
        """What may be selected."""
        return reference.candidates(self.allowed, self.extent - 1, SINK, RECENT)

    def history(self, score: Attended) -> Tensor:
        """After the step, float64 [H, N]."""
        left = score.fading**self.since * score.per_step if self.since else 0.0
        past = self.past.nan_to_num(0.0) if self.since else torch.zeros_like(self.past)
        logits = self.logits if self.status <= RowStatus.SHORT else torch.full_like(self.logits, -INF)
        found = [reference.attended(h, x, self.allowed, left) for h, x in zip(past, logits, strict=True)]
        return torch.stack(found)

    def scores(self, score: Attended) -> Tensor:
        """Float64 [H, N]."""
        norms = self.values.double().norm(dim=-1).clamp_min(1e-6) if score.by_value else torch.ones(1)
        f = torch.where(self.history(score) > 0, self.history(score) * norms, 0.0)
        return torch.stack([reference.carried(x, score.weight, score.ahead, score.decay) for x in f])


def row_of(seed: int, heads: int = 2, rows: int = 3, extent: int = SIZE, kind: str = "normal", **changes: int) -> Row:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(heads, rows, SIZE, generator=g)
    if kind == "equal":
        logits = torch.ones_like(logits)
    elif kind == "dominant":
        logits[..., extent // 2] += 60
    elif kind == "blocked":
        logits[:, 0] = -INF
        logits[..., ::3] = -INF
    elif kind == "huge":
        logits *= 3e3
    logits[..., extent:] = math.nan
    values = torch.randn(heads, SIZE, 8, generator=g)
    row = Row(logits, values, torch.rand(heads, SIZE, generator=g), extent, **changes)  # type: ignore[arg-type]
    # What was not there at the last slow step has no history.
    row.past *= torch.arange(SIZE) < min(SIZE - row.since, extent)
    return row


def operands(rows: list[Row], score: Attended) -> list[Tensor]:
    """Of one site: what is its own, then what rows share. Positions are followed by places that are nobody's."""
    logits, values = (torch.stack([getattr(r, x) for r in rows]) for x in ("logits", "values"))
    lse, log_norm = logits.nan_to_num(-INF).logsumexp(-1), values.norm(dim=-1).clamp_min(1e-6).log()
    history, place = torch.stack([r.past for r in rows]), torch.full((len(rows), SIZE), math.nan)
    for b, row in enumerate(rows):
        log_norm[b, :, row.extent :] = math.nan
        place[b, : row.extent] = torch.where(row.candidates, 0.5, -INF)[: row.extent]
        history[b, :, SIZE - row.since if row.since else 0 :] = math.nan
        if not row.slow:
            logits[b], lse[b], log_norm[b], place[b] = math.nan, math.nan, math.nan, math.nan
    wide = [torch.nn.functional.pad(x, (0, PADDED - SIZE), value=math.nan) for x in (logits, log_norm, history)]
    shared = [torch.tensor([getattr(r, x) for r in rows]) for x in ("slow", "status", "since")]
    extent, position = torch.tensor([[r.extent, r.extent, 0] for r in rows]), torch.tensor([SIZE - 2, SIZE - 1])
    return [wide[0], lse, *wide[1:3], *shared[:2], extent, position, shared[2], place]


def selected(
    sites: list[list[Tensor]], score: Attended, k: int = 9, tiles: Tiles = SMALL
) -> tuple[Tensor, list[Tensor]]:
    """Positions, and histories: of copies, since those of another process are the same memory."""
    return interpreted(_select, copy.deepcopy(sites), score, k, tiles)  # type: ignore[no-any-return]


def _select(sites: list[list[Tensor]], score: Attended, k: int, tiles: Tiles) -> tuple[Tensor, list[Tensor]]:
    own = [[site[i] for site in sites] for i in range(4)]
    history = own[3] if score.fading < 1 or score.per_step else []
    chosen = attended_cuda.select_rows(*own[:3], history, *sites[0][4:], score, k, tiles)
    return chosen, own[3]


def assert_right(rows: list[Row], score: Attended, k: int = 9, tiles: Tiles = SMALL) -> None:
    """The oracle's histories and positions, but for positions whose scores rounding may exchange."""
    given = operands(rows, score)
    chosen, [history] = selected([given], score, k, tiles)
    assert chosen.shape == (1, len(rows), rows[0].past.shape[0], k)
    for b, row in enumerate(rows):
        if not row.slow:
            torch.testing.assert_close(history[b], given[3][b], rtol=0, atol=0, equal_nan=True)
        elif score.per_step:
            torch.testing.assert_close(history[b, :, :SIZE].double(), row.history(score), rtol=2e-5, atol=1e-30)
        for of_head, scores in zip(chosen[0, b].tolist(), row.scores(score), strict=True):
            if not row.slow or row.status != RowStatus.READY:
                assert of_head == [-1] * len(of_head)
                continue
            right, held = reference.best(scores, row.candidates, k), [t for t in of_head if t >= 0]
            assert held == sorted(set(held))
            assert of_head == held + [-1] * (len(of_head) - len(held))
            assert len(held) == len(right)
            assert all(row.candidates[t] for t in held)
            disputed = list(set(held) ^ set(right))
            kth = min((scores[t] for t in right), default=torch.tensor(0.0))
            # The logarithm that becomes a key is right to 2^-22 of its size, at most 134.
            assert ((scores[disputed] / kth).log2().abs() <= 2 * 134 * 2.0**-22 + 1e-5).all()


def test_rows_of_all_kinds_in_one_batch() -> None:
    kinds = [
        row_of(0), row_of(1, extent=70), row_of(2, since=0), row_of(3, extent=41, since=0), row_of(4, slow=False),
        row_of(5, status=int(RowStatus.SHORT)), row_of(6, status=int(RowStatus.SHORT), since=0),
        row_of(7, status=int(RowStatus.AHEAD)), row_of(8, status=int(RowStatus.SPLIT), since=0), row_of(9, extent=1),
        row_of(10, slow=False, since=0),
    ]  # fmt: skip
    assert_right(kinds, REACH)


@pytest.mark.parametrize("kind", ["equal", "dominant", "blocked", "huge"])
def test_adversarial_logits(kind: str) -> None:
    rows = [row_of(20, kind=kind), row_of(21, kind=kind, since=0), row_of(22, kind=kind, extent=33)]
    for row in rows:
        if kind == "equal":
            row.past.zero_()
            row.values = torch.ones_like(row.values)
        row.past[:, 10] *= 1e6
    assert_right(rows, REACH)


@pytest.mark.parametrize(
    "score",
    [
        Attended(),
        Attended(per_step=0.0),
        Attended(fading=0.0, weight=1.0, ahead=3),
        Attended(fading=0.99, per_step=0.5, by_value=True),
        Attended(by_value=True, weight=2.0, ahead=128, decay=0.5),
        Attended(weight=1.0, ahead=4, decay=0.0),
        Attended(weight=0.5, ahead=0),
        Attended(by_value=True, weight=0.2, ahead=17, decay=0.93),
        # What is looked back on ends just before a program's positions, and just in those before it.
        Attended(weight=0.2, ahead=13, decay=0.9),
        Attended(weight=0.2, ahead=16, decay=0.9),
    ],
)
def test_every_form_of_the_score(score: Attended) -> None:
    assert_right([row_of(30), row_of(31, extent=77), row_of(32, since=0)], score)
    assert_right([row_of(33, heads=3, rows=1), row_of(34, heads=3, rows=1, since=40)], score, k=SIZE)
    # Lengths about a multiple of what a program of `carry` takes.
    assert_right([row_of(35 + e, heads=1, extent=e) for e in (95, 96, 97)], score)


def test_a_score_without_a_history_reads_none() -> None:
    """`topk`: what lies where a history would be is not touched."""
    rows = [row_of(40), row_of(41, since=0)]
    score = Attended(per_step=0.0)
    given = operands(rows, score)
    given[3] = torch.full_like(given[3], math.nan)
    chosen, [untouched] = selected([given], score)
    assert untouched.isnan().all()
    for b, row in enumerate(rows):
        for of_head, scores in zip(chosen[0, b].tolist(), row.scores(score), strict=True):
            assert of_head == reference.best(scores, row.candidates, 9)


def test_several_sites_at_once_are_each_of_them_alone() -> None:
    sites = [operands([row_of(50 + i), row_of(60 + i, extent=80, since=i)], REACH) for i in range(3)]
    for site in sites[1:]:
        site[4:] = sites[0][4:]
    together, histories = selected(sites, REACH)
    for i, site in enumerate(sites):
        alone, [history] = selected([site], REACH)
        assert torch.equal(together[i : i + 1], alone)
        torch.testing.assert_close(histories[i], history, rtol=0, atol=0, equal_nan=True)


def test_a_sample_that_misleads_costs_time_only() -> None:
    """Everything is above what the ranges tell apart: the list is all there is."""
    row = row_of(70)
    row.past[:, : SIZE - row.since] += 1e5
    assert_right([row], REACH, k=20)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("ahead", [17, attended_cuda.MOST_AHEAD])
@pytest.mark.parametrize("capability", TARGETS)
def test_compiles_without_spills(capability: int, ahead: int) -> None:
    from sfi_compile.kernels import triton_attended
    from tests.kernels.triton_launches import recorded

    ints = [meta(*shape, dtype=torch.int64) for shape in ((4,), (4, 3), (1,), (4,))]
    own = (meta(4, 8, 4, 131072), meta(4, 8, 4), meta(4, 8, 131072), meta(4, 8, 131072))
    score = Attended(0.99, 1.0, True, 0.3, ahead, 0.8)
    with recorded(triton_attended, "add", "carry") as launches, recorded_elsewhere():
        lists = ([x] * 3 for x in own)
        found = attended_cuda.select_rows(*lists, meta(4, dtype=torch.bool), *ints, meta(4, 131072), score, 1536)
    assert found.shape == (3, 4, 8, 1536)
    assert [launch.kernel.__name__ for launch in launches] == ["add", "carry"]
    for launch in launches:
        used = launch.usage(capability)
        assert used.spilled == 0, launch.kernel.__name__
        assert used.registers * 32 * launch.kwargs["num_warps"] <= 65_536


def recorded_elsewhere():  # type: ignore[no-untyped-def]
    """The other kernels of a selection, which have their own tests."""
    import contextlib

    from sfi_compile.kernels import triton_addresses, triton_top_k
    from tests.kernels.triton_launches import recorded

    stack = contextlib.ExitStack()
    stack.enter_context(recorded(triton_addresses, "put"))
    stack.enter_context(recorded(triton_top_k, "sample", "gather", "threshold", "write"))
    return stack


def test_statuses_are_the_operators() -> None:
    from sfi_compile.kernels import triton_attended, triton_top_k

    assert triton_attended.SHORT.value == int(RowStatus.SHORT)
    assert triton_top_k.BINS.value == top_k_cuda.BINS
