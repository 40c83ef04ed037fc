"""Queries that may attend to nothing: a slow step gives what the model's own softmax makes of the numbers it then sees.

A mean of all values where they are equal, NaN where all are -inf, zeros where a function says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sfi_compile.ops import RowStatus
from tests.passes.toys import SDPA, compiled, record, state, tensor

B, H, Q, N, D = 4, 4, 2, 8, 4
INF = float("-inf")
MIN = torch.finfo(torch.float64).min
Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chain(change: Callable[[Tensor, Tensor], Tensor]) -> Body:
    return lambda q, k, v, m: change(q @ k.mT * 0.4, m).softmax(-1) @ v


def bias(m: Tensor, number: float) -> Tensor:
    return torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, number)


def slopes() -> Tensor:
    return torch.arange(1, H + 1).reshape(1, H, 1, 1).double() / 8 * torch.arange(N)


def sinks(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    column = torch.full((B, H, Q, 1), -1e9).double()
    return torch.cat([(q @ k.mT).masked_fill(~m, -1e9), column], -1).softmax(-1)[..., :-1] @ v


early = torch.arange(N) < 3
FINITE: dict[str, Body] = {
    "filled": chain(lambda s, m: s.masked_fill(~m, -1e9)),
    "filled with the least number": chain(lambda s, m: s.masked_fill(~m, MIN)),
    "filled with a small number": chain(lambda s, m: s.masked_fill(~m, -6000.0)),
    "filled by where": chain(lambda s, m: torch.where(m, s, -1e4)),
    "filled before a scale": chain(lambda s, m: s.masked_fill(~m, -1e5) / 2),
    "filled with two numbers": chain(lambda s, m: s.masked_fill(~m, -1e9).masked_fill(~m & early, -1e4)),
    "filled with one number twice": chain(lambda s, m: s.masked_fill(~m, -1e4).masked_fill(~m & early, -1e4)),
    "filled in parts": chain(lambda s, m: s.masked_fill(~m & ~early, INF).masked_fill(~m & early, -1e4)),
    "filled, then added to": chain(lambda s, m: torch.where(m, s, -1e4) + slopes()),
    "added to, then filled": chain(lambda s, m: (s + slopes()).masked_fill(~m, -1e4)),
    "blocked, then filled": chain(lambda s, m: (s + bias(m, INF)).masked_fill(~m & early, -1e4)),
    "a floor": chain(lambda s, m: torch.max(s + bias(m, INF), torch.tensor(-1e30))),
    "a floor above another": chain(lambda s, m: (torch.where(m, s, -1e9) + slopes()).clamp_min(-1e6)),
    "added": chain(lambda s, m: s + bias(m, -1e4)),
    "the least number added": chain(lambda s, m: s + bias(m, MIN)),
    "beside sinks": sinks,
    "under a softcap": lambda q, k, v, m: (torch.tanh(q @ k.mT / 2) * 2).masked_fill(~m, -1e9).softmax(-1) @ v,
    "sdpa, added": lambda q, k, v, m: SDPA(q, k, v, attn_mask=bias(m, -1e4)),
    "sdpa, the least number": lambda q, k, v, m: SDPA(q, k, v, attn_mask=bias(m, MIN)),
}
NAN: dict[str, Body] = {
    "filled": chain(lambda s, m: s.masked_fill(~m, INF)),
    "added": chain(lambda s, m: s + bias(m, INF)),
}
ZEROS: dict[str, Body] = {
    "sdpa": lambda q, k, v, m: SDPA(q, k, v, attn_mask=m),
    "sdpa, added": lambda q, k, v, m: SDPA(q, k, v, attn_mask=bias(m, INF)),
    "nan_to_num": lambda q, k, v, m: (q @ k.mT).masked_fill(~m, INF).softmax(-1).nan_to_num(0.0) @ v,
}
READY, SHORT, NOT_FINITE, _, AHEAD = map(int, RowStatus)


def slow_step(body: Body, at: int = 4) -> tuple[Tensor, Tensor, list[int]]:
    """What the slow graph gives, what the model gives, and the status of each row.

    The first row sees all; of the second nothing is seen, of the third not by one head, of the last not by one query.
    """

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, given: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        return body(q, keys, values, given & (torch.arange(N) <= pos[:, None]))

    given = torch.ones(B, H, Q, N, dtype=torch.bool)
    given[1] = given[2, 2] = given[3, :, 0] = False
    new, cached = ([tensor(B, H, n, D, seed=10 * n + i).double() for i in range(3)] for n in (Q, N))
    recorded = record(function, *new, *cached[:2], torch.arange(at, at + Q), given)
    work = compiled(recorded.module, "verify", k_head=N)
    held = state(work, slow=True)
    return work.variants[0](*recorded.fresh(), *held)[0], recorded.module(*recorded.fresh())[0], held[2].tolist()


@pytest.mark.parametrize("name", FINITE)
def test_blocked_with_a_number(name: str) -> None:
    """Equal weights for all that is allocated, written or not: what no memory holds, so the row gets none."""
    found, expected, status = slow_step(FINITE[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert status == [READY, AHEAD, AHEAD, AHEAD]


@pytest.mark.parametrize("name", ["filled", "sdpa, the least number"])
def test_at_the_last_position(name: str) -> None:
    """All tokens are written, and seen by a query that is blocked."""
    found, expected, _ = slow_step(FINITE[name], at=N - Q)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAN)
def test_blocked_with_infinity(name: str) -> None:
    found, expected, status = slow_step(NAN[name])
    assert expected[1].isnan().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)
    assert status == [READY, NOT_FINITE, NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize("name", ZEROS)
def test_blocked_without_a_trace(name: str) -> None:
    """Heads and queries without tokens are no reason to go without a memory; a row without any is."""
    found, expected, status = slow_step(ZEROS[name])
    assert expected[1].eq(0).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert status == [READY, SHORT, READY, READY]
