"""Ways of writing a step's tokens into a cache: each is a site that computes the same; near misses are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.toys import SDPA, check_step, codes, matched, record, tensor

B, H, N, D, AT = 2, 2, 8, 4, 5
Write = Callable[[Tensor, Tensor, Tensor], Any]


def attend(write: Write, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    write(keys, pos, k)
    write(values, pos, v)
    last = pos if pos.dim() == 0 or pos.shape[0] == 1 else pos[:, None]
    mask = torch.arange(N) <= last
    return SDPA(q, keys, values, attn_mask=mask.expand(1, 1, q.shape[2], N))


def step_of(write: Write) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return attend(write, q, k, v, keys, values, pos)

    return function


def given(*, queries: int = 1, scalar: bool = False) -> tuple[Tensor, ...]:
    q, k, v = (tensor(B, H, queries, D, seed=i).double() for i in range(3))
    keys, values = (tensor(B, H, N, D, seed=i).double() for i in (3, 4))
    pos = torch.tensor(AT) if scalar else torch.arange(AT - queries + 1, AT + 1)
    return q, k, v, keys, values, pos


def assign(cache: Tensor, index: Any, value: Tensor) -> None:
    cache[index] = value


ALL = slice(None)
BY_TENSOR: dict[str, Write] = {
    "index_copy_": lambda c, p, t: c.index_copy_(2, p, t),
    "index_copy_, negative axis": lambda c, p, t: c.index_copy_(-2, p, t),
    "index_copy_ into a view of all": lambda c, p, t: c.view(B, H, N, D).index_copy_(2, p, t),
    "setitem": lambda c, p, t: assign(c, (ALL, ALL, p), t),
    "setitem with an ellipsis": lambda c, p, t: assign(c, (..., p, ALL), t),
    "setitem, all axes": lambda c, p, t: assign(c, (ALL, ALL, p, ALL), t),
    "setitem, one row for all heads": lambda c, p, t: assign(c, (ALL, ALL, p), t[:, :1]),
    "scatter_": lambda c, p, t: c.scatter_(2, p.view(1, 1, 1, 1).expand(B, H, 1, D), t),
    "scatter_, a repeated index": lambda c, p, t: c.scatter_(2, p[None, None, :, None].repeat(B, H, 1, D), t),
    "cast to the dtype": lambda c, p, t: assign(c, (ALL, ALL, p), t.float().to(c.dtype)),
}
BY_SCALAR: dict[str, Write] = {
    "setitem": lambda c, p, t: assign(c, (ALL, ALL, p), t[:, :, 0]),
    "setitem of several axes": lambda c, p, t: assign(c, (ALL, ALL, p[None]), t),
}
SEVERAL = {n: w for n, w in BY_TENSOR.items() if "scatter" not in n}


@pytest.mark.parametrize("name", BY_TENSOR)
def test_at_a_tensor(name: str) -> None:
    work = check_step(step_of(BY_TENSOR[name]), *given(), tolerance=1e-6 if "dtype" in name else 1e-12)
    for write in work.matched.sites[0].writes:
        assert (write.axis, write.batch_axis, write.count) == (2, 0, 1)


@pytest.mark.parametrize("name", BY_SCALAR)
def test_at_a_scalar_tensor(name: str) -> None:
    check_step(step_of(BY_SCALAR[name]), *given(scalar=True))


@pytest.mark.parametrize("name", SEVERAL)
def test_several_new_tokens(name: str) -> None:
    tolerance = 1e-6 if "dtype" in name else 1e-12
    (site,) = check_step(step_of(SEVERAL[name]), *given(queries=2), tolerance=tolerance).matched.sites
    assert {(w.axis, w.count) for w in site.writes} == {(2, 2)}


def numbered(write: Callable[[Tensor, int, Tensor], Any]) -> Callable[..., Tensor]:
    """The position is a number, and symbolic: Dynamo hands it over as an input."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, at: int, more: int = 0
    ) -> Tensor:
        write(keys, at, k)
        write(values, at, v)
        return SDPA(q, keys, values, attn_mask=(torch.arange(N) <= at)[None, None, None])

    return function


BY_NUMBER: dict[str, Callable[[Tensor, int, Tensor], Any]] = {
    "setitem": lambda c, p, t: assign(c, (ALL, ALL, p), t[:, :, 0]),
    "setitem of a slice": lambda c, p, t: assign(c, (ALL, ALL, slice(p, p + 1)), t),
    "copy_ into a slice": lambda c, p, t: c[:, :, p : p + 1].copy_(t),
    "copy_ into an item": lambda c, p, t: c[:, :, p].copy_(t[:, :, 0]),
    "copy_ into a narrow": lambda c, p, t: c.narrow(2, p, 1).copy_(t),
    "copy_ into a select": lambda c, p, t: c.select(2, p).copy_(t.squeeze(2)),
}


PINNED = {"setitem", "copy_ into an item"}
"""Dynamo itself takes a number that indexes, unlike one that slices, for a constant."""


@pytest.mark.parametrize(
    ("name", "dynamic"), [(n, d) for n in BY_NUMBER for d in (False, True) if not d or n not in PINNED]
)
def test_at_a_number(name: str, dynamic: bool) -> None:
    (site,) = check_step(numbered(BY_NUMBER[name]), *given(), AT, dynamic=dynamic).matched.sites
    assert [(w.count, w.index == AT) for w in site.writes] == [(1, not dynamic)] * 2


def read_back(**changes: Any) -> Callable[..., Tensor]:
    """Keys are written in the way under test, values by index_copy_."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        changes["write"](keys, pos, k)
        values.index_copy_(2, pos, v)
        return SDPA(q, keys, values, attn_mask=(torch.arange(N) <= pos[-1:])[None, None, None])

    return function


NEAR: dict[str, Write] = {
    "a value for all of a slice": lambda c, p, t: assign(c, (ALL, ALL, slice(4, 7)), t),
    "copy_ of one token into a slice of three": lambda c, p, t: c[:, :, 4:7].copy_(t),
    "copy_ of one token into a narrow of three": lambda c, p, t: c.narrow(2, 4, 3).copy_(t),
    "a negative index": lambda c, p, t: assign(c, (ALL, ALL, -1), t[:, :, 0]),
    "a negative slice": lambda c, p, t: assign(c, (ALL, ALL, slice(-1, None)), t),
    "a strided slice": lambda c, p, t: assign(c, (ALL, ALL, slice(0, None, 8)), t),
    "an open slice": lambda c, p, t: assign(c, (ALL, ALL, slice(7, None)), t),
    "a bool mask": lambda c, p, t: assign(c, (ALL, ALL, torch.arange(N) == 5), t),
    "two positions for one query": lambda c, p, t: assign(c, (ALL, ALL, torch.cat([p - 1, p])), t),
    "two copied positions for one query": lambda c, p, t: c.index_copy_(2, torch.cat([p - 1, p]), t.expand(B, H, 2, D)),
    "a position per row": lambda c, p, t: c.scatter_(2, (p + torch.arange(B)).view(B, 1, 1, 1).expand(B, H, 1, D), t),
    "a position per head": lambda c, p, t: c.scatter_(2, (p + torch.arange(H)).view(1, H, 1, 1).expand(B, H, 1, D), t),
    "a part of the rows": lambda c, p, t: c.scatter_(2, p.view(1, 1, 1, 1).expand(1, H, 1, D), t),
    "a scatter that adds": lambda c, p, t: c.scatter_add_(2, p.view(1, 1, 1, 1).expand(B, H, 1, D), t),
    "an index that adds": lambda c, p, t: c.index_add_(2, p, t),
    "an index_put_ that accumulates": lambda c, p, t: c.index_put_(
        (torch.arange(B),), t[:, :, :1].expand(B, H, N, D), True
    ),
    "one row only": lambda c, p, t: assign(c, (slice(0, 1), ALL, p), t[:1]),
    "another axis": lambda c, p, t: c.index_copy_(3, p % D, t.expand(B, H, N, D)[..., :1]),
    "rows and positions": lambda c, p, t: assign(c, (torch.arange(B), ALL, p), t[:, :, 0]),
    "fill": lambda c, p, t: c.index_fill_(2, p, 0.5),
    "add": lambda c, p, t: c.add_(t),
    "a copy into a part of a slice": lambda c, p, t: c[:, :, 5:6][:, :1].copy_(t[:, :1]),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    assert codes(read_back(write=NEAR[name]), *given()) == (0, ["cache-write"])


def test_a_window_that_rolls() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys.copy_(torch.cat([keys[:, :, 1:], k], 2))
        values.copy_(torch.cat([values[:, :, 1:], v], 2))
        return SDPA(q, keys, values)

    assert codes(function, *given()[:5]) == (0, ["rolling-window"])


def test_as_many_tokens_as_the_cache_is_long() -> None:
    """All of it written is no cache."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, :, 0:N] = k
        values[:, :, 0:N] = v
        return SDPA(q, keys, values)

    q, k, v = (tensor(B, H, N, D, seed=i) for i in range(3))
    assert codes(function, q, k, v, tensor(B, H, N, D), tensor(B, H, N, D)) == (0, ["cache-write"])


def test_axes_in_another_order() -> None:
    """[tokens, batch, heads, features], and heads of one merged feature axis."""

    def tokens_first(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(0, pos, k.permute(2, 0, 1, 3))
        values[pos] = v.permute(2, 0, 1, 3)
        mask = (torch.arange(N) <= pos)[None, None, None]
        return SDPA(q, keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), attn_mask=mask)

    q, k, v, keys, values, pos = given()
    turned = (t.permute(2, 0, 1, 3).contiguous() for t in (keys, values))
    (site,) = check_step(tokens_first, q, k, v, *turned, pos).matched.sites
    assert {(w.axis, w.batch_axis) for w in site.writes} == {(0, 1)}

    def merged(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys[:, pos] = k.transpose(1, 2).reshape(B, 1, H * D)
        values[:, pos] = v.transpose(1, 2).reshape(B, 1, H * D)
        mask = (torch.arange(N) <= pos)[None, None, None]
        return SDPA(q, *(t.view(B, N, H, D).transpose(1, 2) for t in (keys, values)), attn_mask=mask)

    flat = (t.transpose(1, 2).reshape(B, N, H * D) for t in (keys, values))
    (site,) = check_step(merged, q, k, v, *flat, pos).matched.sites
    assert {(w.axis, w.batch_axis) for w in site.writes} == {(1, 0)}


def test_several_caches_behind_one_site() -> None:
    """Latents and rotated parts, each with a write of its own; or halves of the heads."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *more: Tensor) -> Tensor:
        rotated, up = more
        rotated.index_copy_(2, pos, k[..., :2])
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        mask = (torch.arange(N) <= pos)[None, None, None]
        wide = torch.cat([keys @ up, rotated], -1)
        return SDPA(torch.cat([q, q[..., :2]], -1), wide, values, attn_mask=mask)

    (site,) = check_step(function, *given(), tensor(B, H, N, 2, seed=8).double(), tensor(D, D).double()).matched.sites
    assert {w.root.name for w in site.writes[:2]} == {"l_keys_", "l_more_0_"}
    assert [w.root.name for w in site.writes[2:]] == ["l_values_"]
    assert [n.name for n in site.constants] == ["l_more_1_"]


def test_a_position_of_its_own_for_keys_and_values() -> None:
    """Each counts for itself; that they agree is for the runtime to watch."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, other: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, other, v)
        return SDPA(q, keys, values, attn_mask=(torch.arange(N) <= pos)[None, None, None])

    found = matched(record(function, *given(), torch.tensor([AT])).module)
    assert found.guard is not None
    assert len(found.guard.positions) == 2


def test_caches_written_at_unequal_numbers_of_positions() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos[-1:], v[:, :, :1])
        return SDPA(q, keys + values, values, attn_mask=(torch.arange(N) <= pos[:, None])[None, None])

    assert codes(function, *given(queries=2)) == (0, ["cache-write"])
