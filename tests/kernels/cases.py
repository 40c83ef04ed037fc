"""Random attention sites for the tests of `sfi::` operators, and the float64 answer to each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sfi_compile.config import Config
from sfi_compile.kernels import reference

BLOCKED = -5000.0
"""A bias below this blocks."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True, repr=False)
class Attention:
    """Inputs of one site. `slow_rows` names the rows that may be read; the context of the others is poisoned."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    slow_rows: Tensor
    scale: float
    lengths: tuple[int, ...]
    """One past the last position that a row may attend to."""

    def __repr__(self) -> str:
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "mask")}
        shown = ", ".join(f"{name}={t.dtype} {tuple(t.shape)}" for name, t in tensors.items())
        return f"Attention({shown}, slow={self.slow}, scale={self.scale}, lengths={self.lengths})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # how hypothesis shows a failing case

    @property
    def slow(self) -> list[int]:
        return [b for b, flag in enumerate(self.slow_rows.tolist()) if flag]

    def mask_of(self, b: int) -> Tensor:
        """[Hq, Q, N]."""
        row = self.mask[b if self.mask.shape[0] > 1 else 0]
        return row.expand(self.q.shape[1], self.q.shape[2], self.k.shape[2])

    def allowed(self, b: int) -> Tensor:
        """What any query of a row may attend to: bool [N]."""
        mask = self.mask_of(b)[0]
        return (mask if mask.dtype == torch.bool else mask > BLOCKED).any(0)

    def clean(self) -> tuple[Tensor, Tensor]:
        """Keys and values without poison: what a slow row may read is unchanged, the rest is zero."""
        return self.k.nan_to_num(0.0), self.v.nan_to_num(0.0)

    def exact(self, b: int) -> Tensor:
        """Attention of one row in float64: [Hq, Q, Dv]."""
        k, v = self.clean()
        return reference.attention(self.q[b], k[b], v[b], self.mask_of(b), self.scale)

    def budget(self, b: int) -> float:
        """Twice the error that eager attention makes in the same dtype, or what rounding alone may do.

        Weights and output are rounded to the dtype, each to half a unit in the last place; logits are rounded in
        float32 at least, and an error of theirs is relative in the weights.
        """
        k, v = self.clean()
        mask = self.mask_of(b)[None]
        mask = mask if mask.dtype == torch.bool else mask.to(self.q.dtype)
        eager = scaled_dot_product_attention(
            self.q[b, None], k[b, None], v[b, None], mask, scale=self.scale, enable_gqa=True
        )
        error = (eager[0].double() - self.exact(b)).abs().max()
        logits = reference.logits(self.q[b], k[b], None, self.scale)[..., : self.lengths[b]].abs().max()
        wide = torch.finfo(torch.promote_types(self.q.dtype, torch.float32)).eps
        rounding = torch.finfo(v.dtype).eps + 4 * wide * (1 + float(logits))
        return max(2 * float(error), rounding * float(v[b].abs().max()))

    def row(self, b: int) -> Attention:
        """The same row as a batch of one."""
        mask = self.mask[b : b + 1] if self.mask.shape[0] > 1 else self.mask
        one = slice(b, b + 1)
        return Attention(
            self.q[one], self.k[one], self.v[one], mask, self.slow_rows[one], self.scale, (self.lengths[b],)
        )

    def copies(self, b: int) -> Attention:
        """A batch as large, of that row alone."""
        same = [b] * self.q.shape[0]
        mask = self.mask[same] if self.mask.shape[0] > 1 else self.mask
        lengths = tuple(self.lengths[i] for i in same)
        return Attention(self.q[same], self.k[same], self.v[same], mask, self.slow_rows[same], self.scale, lengths)


def poisoned(x: Tensor, slow_rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """NaN over the whole context of rows that are not slow, and past the end of those that are."""
    x = x.clone()
    for b, length in enumerate(lengths):
        x[b, :, length if slow_rows[b] else 0 :] = math.nan
    return x


@st.composite
def attentions(draw: st.DrawFn, queries: int = 3, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Attention:
    """Any batch, group, width, mask and dtype; NaN wherever an operator must not look."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    query_len = draw(st.integers(1, queries))
    size = draw(st.sampled_from([64, 40, 17, 8, 3])) + query_len
    key_dim, value_dim = (draw(st.sampled_from([16, 8, 5, 1])) for _ in range(2))
    dtype = draw(st.sampled_from(dtypes))
    shared = draw(st.booleans())
    lengths = [draw(st.integers(query_len, size)) for _ in range(batch)]
    lengths = [lengths[0]] * batch if shared else lengths
    padding = [draw(st.integers(0, length - query_len)) for length in lengths]
    holes = draw(st.sampled_from([0.0, 0.0, 0.5]))
    rows = 1 if shared else batch
    t, i = torch.arange(size), torch.arange(query_len)
    mask = torch.rand(rows, 1, query_len, size, generator=g) >= holes
    for b in range(rows):
        own = lengths[b] - query_len + i[:, None]
        mask[b] = (mask[b] | (t == own)) & (t >= padding[b]) & (t <= own)
    kind = draw(st.sampled_from(["bool", "inf", "min", "far"]))
    if kind != "bool":
        blocked = {"inf": -math.inf, "min": torch.finfo(dtype).min, "far": -1e4}[kind]
        bias = torch.randn(mask.shape, generator=g) * draw(st.sampled_from([0.0, 2.0]))
        mask = bias.to(dtype).masked_fill(~mask, blocked)
    magnitude = draw(st.sampled_from([0.3, 1.0, 4.0]))
    q = magnitude * torch.randn(batch, kv_heads * group, query_len, key_dim, generator=g)
    k, v = (torch.randn(batch, kv_heads, size, dim, generator=g).to(dtype) for dim in (key_dim, value_dim))
    slow_rows = torch.tensor(draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    k, v = (poisoned(x, slow_rows, tuple(lengths)) for x in (k, v))
    scale = draw(st.sampled_from([key_dim**-0.5, 1.0, 0.1]))
    return Attention(q.to(dtype), k, v, mask, slow_rows, scale, tuple(lengths))


def dense(case: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, logits, status, context) of `sfi::dense_attention`; status starts at 0, context at -7."""
    status = torch.zeros(case.q.shape[0], dtype=torch.int64)
    context = torch.full_like(status, -7)
    extent = frame(case)[0]
    both = torch.ops.sfi.dense_attention(
        case.q, case.k, case.v, case.mask, case.slow_rows, extent, case.scale, status, context
    )
    return *both, status, context


def frame(case: Attention, config: Config | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(extent, log_position, held) of `sfi::frame`, for a refresh at the last position of the longest row."""
    config = config or Config()
    queries, size = case.q.shape[2], case.k.shape[2]
    position = torch.arange(max(case.lengths) - queries, max(case.lengths))
    selected_end = config.sink + min(config.k_head, size)
    slots = selected_end + config.recent + config.refresh_interval
    spec = config.selector().to_text()
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.sfi.frame(
        case.mask, case.slow_rows, position, spec, selected_end, slots
    )
    return found


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN (integers: with their maximum)."""
    from torch.utils import deterministic

    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]
