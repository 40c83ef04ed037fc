"""What all `sfi::` operators share: true schemas and fakes, rows that do not know each other; gather by definition."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from sfi_compile import ops
from sfi_compile.config import Config
from tests.kernels.cases import Attention, attentions, poisoned_empty

SFI = torch.ops.sfi
ON_DEVICE = ("dense_decode", "append_rows", "refresh_rows")
"""Those that launch kernels, and have tests of their own."""
CONFIG = Config.from_options(
    {"preset": "paper-speed", "sink": 2, "recent": 4, "k_head": 5, "refresh_interval": 3, "nms_window": 6}
)
SPEC = CONFIG.selector().to_text()
HISTORY_SPEC, VALUES_SPEC = (
    dataclasses.replace(CONFIG, policy=policy).selector().to_text() for policy in ("h2o(decay=0.75)", "reach")
)


@pytest.fixture(autouse=True, scope="module")
def _poisoned_empty() -> Iterator[None]:
    with poisoned_empty():
        yield


def state(
    batch: int, kv_heads: int, slots: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """held, mem_k, mem_v as allocated: zero."""
    base = (batch, kv_heads, slots)
    return (
        torch.zeros(base, dtype=torch.int64),
        torch.zeros(*base, key_dim, dtype=dtype),
        torch.zeros(*base, value_dim, dtype=dtype),
    )


def whole_step(case: Attention, position: int) -> tuple[Tensor, ...]:
    """Everything that a slow branch computes and writes, and a fast branch one token later."""
    batch, kv_heads, size, key_dim = case.k.shape
    selected_end = CONFIG.sink + min(CONFIG.k_head, size)
    slots = selected_end + CONFIG.recent + CONFIG.refresh_interval
    memory = state(batch, kv_heads, slots, key_dim, case.v.shape[-1], case.k.dtype)
    status, context = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    at = torch.tensor([position])
    extent, log_position, held = SFI.frame(case.mask, case.slow_rows, at, SPEC, selected_end, slots)
    operands = (case.q, case.k, case.v, case.mask, case.slow_rows, extent, case.scale, status, context)
    out, logits = SFI.dense_attention(*operands)
    history, faded = (torch.full((batch, kv_heads, size), 0.5) for _ in range(2))
    since = torch.tensor(case.lengths) % 3  # 0: sequences that begin
    SFI.accumulate(logits, case.slow_rows, status, extent, since, HISTORY_SPEC, history)
    SFI.accumulate(logits, case.slow_rows, status, extent, since, VALUES_SPEC, faded)
    asked = (logits, case.k, case.slow_rows, status, extent, log_position)
    selected, by_value = SFI.select(*asked, SPEC), SFI.select(*asked, VALUES_SPEC, history=faded, values=case.v)
    SFI.pack(case.k, case.v, selected, held, case.slow_rows, status, CONFIG.sink, *memory)
    token = (case.q[:, :: case.q.shape[1] // kv_heads, :1, :], out[:, :: case.q.shape[1] // kv_heads, :1, :])
    refreshed_at = torch.full((batch,), position)
    SFI.append(*token, at + 1, refreshed_at, selected_end, CONFIG.recent, *memory)
    rank = f"{'b' if case.mask.shape[0] > 1 else '1'}11s"
    mask = SFI.gather(case.mask, memory[0].clamp_max(size - 1), rank)
    mask = mask.expand(batch, kv_heads, 1, slots)
    fast = SFI.memory_attention(case.q, memory[1], memory[2], memory[0], mask, case.scale)
    # What fast rows hold is undefined: no one may read it.
    logits = torch.where(case.slow_rows.reshape(-1, 1, 1, 1), logits, 0.0)
    return out, logits, selected, by_value, status, context, history, faded, *memory, fast


@given(attentions(queries=1))
def test_a_row_alone_is_the_row_in_a_batch(case: Attention) -> None:
    """Bit for bit, with batch mates that are slow, fast, shorter, or full of NaN."""
    assume(case.slow)
    position = max(case.lengths) - 1
    together = whole_step(case, position)
    names = "out logits selected by_value status context history faded held k v fast".split()
    for b in range(case.q.shape[0]):
        alone, copies = whole_step(case.row(b), position), whole_step(case.copies(b), position)
        for name, one, same, many in zip(names, alone, copies, together, strict=True):
            assert torch.equal(same[b].nan_to_num(7.5), many[b].nan_to_num(7.5)), name
            # Attention over the memories multiplies all rows at once, and one row by itself in another order.
            if name != "fast":
                assert torch.equal(one[0].nan_to_num(7.5), many[b].nan_to_num(7.5)), name


# gather


@st.composite
def gathers(draw: st.DrawFn) -> tuple[Tensor, Tensor, str, Tensor | None]:
    """Arguments as the passes make them: axes in any order with s among them, some of size one, some left out."""
    sizes = {"b": draw(st.integers(2, 3)), "h": draw(st.integers(2, 3)), "q": 2, "s": draw(st.integers(2, 9)), "1": 1}
    sizes["m"] = sizes["b"] * sizes["h"]
    letters = draw(st.sampled_from(["bhqs", "mqs", "ms", "qs", "s", "bs"]))
    names = [n if n == "s" or draw(st.booleans()) else "1" for n in draw(st.permutations(letters))]
    layout = "".join(names)
    shape = [sizes[n] for n in layout]
    x = torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).reshape(shape)
    n = draw(st.integers(1, 6))
    count = sizes["b"] * sizes["h"] * n
    flat = draw(st.lists(st.integers(-1, sizes["s"] - 1), min_size=count, max_size=count))
    index = torch.tensor(flat).reshape(sizes["b"], sizes["h"], n)
    rows = None
    if "q" in layout and draw(st.booleans()):
        rows = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)))
    return x, index, layout, rows


@given(gathers())
def test_gather_is_indexing_by_name(arguments: tuple[Tensor, Tensor, str, Tensor | None]) -> None:
    x, index, layout, rows = arguments
    found = SFI.gather(x, index, layout, rows)
    heads = index.shape[1]
    queries = range(x.shape[layout.index("q")]) if "q" in layout else [0]
    queries = queries if rows is None else rows.tolist()
    # An axis of which neither x nor the index knows anything has size one.
    assert found.shape == (*index.shape[:2], len(queries), index.shape[2])
    for b, h, q, s in itertools.product(*(range(size) for size in found.shape)):
        at = {"b": b, "h": h, "m": b * heads + h, "q": queries[q], "s": max(int(index[b, h, s]), 0)}
        assert found[b, h, q, s] == x[tuple(at.get(name, 0) for name in layout)]


def test_gather_reads_only_the_positions_asked_for() -> None:
    x = torch.full((2, 3, 4, 50), float("nan"))
    x[..., 7] = 1.0
    found = SFI.gather(x, torch.full((2, 3, 5), 7), "bhqs")
    assert found.shape == (2, 3, 4, 5)
    assert found.eq(1).all()


# Schemas and fakes


def arguments_of(name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, d, generator=g).to(dtype) for h, n, d in ((6, 1, 8), (3, 20, 8), (3, 20, 5)))
    mask = torch.arange(20)[None, None, None] <= torch.tensor([12, 15])[:, None, None, None]
    slow_rows = torch.tensor([True, False])
    at, status, context = torch.tensor([12]), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    memory = state(2, 3, 14, 8, 5, dtype)
    selected = torch.tensor([[[3, 5, 7, -1, -1]] * 3] * 2)
    logits = torch.randn(2, 3, 2, 20, generator=g).masked_fill(~mask, -torch.inf)
    extent, log_position, held = SFI.frame(mask, slow_rows, at, SPEC, 7, 14)
    sinks, history = torch.randn(1, 6, 1, 2, generator=g).to(dtype), torch.rand(2, 3, 20, generator=g)
    return {
        "gather": (mask.float(), memory[0], "b11s"),
        "attention": (q, k, v, mask, 0.3, 2.0, sinks),
        "frame": (mask, slow_rows, at, SPEC, 7, 14),
        "dense_attention": (q, k, v, mask, slow_rows, extent, 0.3, status, context),
        "select": (logits, k, slow_rows, status, extent, log_position, SPEC),
        "accumulate": (logits, slow_rows, status, extent, torch.tensor([3, 0]), VALUES_SPEC, history),
        "pack": (k, v, selected, held, slow_rows, status, CONFIG.sink, *memory),
        "append": (k[:, :, :1], v[:, :, :1], at + 1, at.expand(2).clone(), 7, 4, *memory),
        "memory_attention": (q, memory[1], memory[2], memory[0], mask[:, :, :, :14].expand(2, 3, 1, 14), 0.3),
        "still": (at,),
        "remember": (q, at, torch.zeros(2, 6, 4, 8, dtype=dtype)),
        "linear": (q, [k[0, 0], k[0, 1, :7]], [None, k[1, 0, :7, 0].clone()]),
    }[name]


NAMES = [
    "gather",
    "attention",
    "frame",
    "dense_attention",
    "accumulate",
    "select",
    "pack",
    "append",
    "memory_attention",
    "linear",
    "still",
    "remember",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake_say_what_the_operator_does(name: str, dtype: torch.dtype) -> None:
    operator = getattr(SFI, name).default
    torch.library.opcheck(operator, arguments_of(name, dtype), test_utils=("test_schema", "test_faketensor"))


def test_a_selection_that_asks_earlier_queries_is_described_likewise() -> None:
    queries, started_at = torch.randn(2, 6, 4, 8), torch.tensor([10, 12])
    asked = (*arguments_of("select", torch.float32), 0.3, 2.0, queries, torch.tensor([12]), started_at)
    torch.library.opcheck(SFI.select.default, asked, test_utils=("test_schema", "test_faketensor"))
    with_history = (*asked[:6], HISTORY_SPEC, *asked[7:], torch.rand(2, 3, 20))
    torch.library.opcheck(SFI.select.default, with_history, test_utils=("test_schema", "test_faketensor"))


def test_a_selection_that_looks_at_a_history_and_the_values_is_described_likewise() -> None:
    asked = (*arguments_of("select", torch.float32)[:6], VALUES_SPEC)
    given = {"history": torch.rand(2, 3, 20), "values": torch.randn(2, 3, 20, 5)}
    torch.library.opcheck(SFI.select.default, asked, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", sorted(ops.plain))
def test_the_traced_body_is_the_operator(name: str) -> None:
    """`lower` puts the plain body in the operator's place."""
    one, two = arguments_of(name, torch.float32), arguments_of(name, torch.float32)
    plain: Any = ops.plain[name]
    body = plain(*one)
    found = getattr(SFI, name)(*two)
    results = [*zip(one, two, strict=True), (body, found)]
    pairs = [(a, b) for a, b in results if isinstance(a, Tensor)]
    assert len(pairs) > 2
    assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)


def test_every_operator_is_covered() -> None:
    registered = {
        name.removeprefix("sfi::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sfi::")
    }
    assert registered == {*NAMES, *ON_DEVICE}


def test_operators_that_read_flags_stay_out_of_cuda_graphs() -> None:
    unsafe = {n for n in (*NAMES, *ON_DEVICE) if torch._C.Tag.cudagraph_unsafe in getattr(SFI, n).default.tags}
    assert unsafe == {"frame", "dense_attention", "accumulate", "select", "pack"}


def test_slots_past_the_length_count_as_empty() -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 1, 8, generator=g)
    k, v = (torch.randn(3, 2, 10, 8, generator=g) for _ in range(2))
    mask = torch.ones(3, 2, 1, 10, dtype=torch.bool)
    held, length = torch.arange(10).repeat(3, 2, 1), torch.tensor([10, 4, 0])
    emptied = held.masked_fill(held >= length[:, None, None], -1)
    found = torch.ops.sfi.memory_attention(q, k, v, held, mask, 1.0, 0.0, None, length)
    assert torch.equal(found, torch.ops.sfi.memory_attention(q, k, v, emptied, mask, 1.0))
    assert found[2].eq(0).all()
