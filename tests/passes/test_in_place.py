"""What is changed in place on the way to attention: rewritten as it is, or refused, but never read as it was before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.test_chains import HQ, B, D, F, N, S, bias_of, given, merged, repeated, step_of
from tests.passes.toys import SDPA, check_step, codes, written

Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def changed_queries(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """A reshape that copies, and then another value in what it copied."""
    q = q * 1.0
    flat = q.transpose(0, 1).reshape(B * HQ, 1, D)
    q.mul_(2)
    keys, values = (repeated(t).transpose(0, 1).reshape(B * HQ, N, D) for t in (k, v))
    scores = torch.bmm(flat, keys.mT).view(HQ, B, 1, N).transpose(0, 1) + bias_of(m)
    return scores.transpose(0, 1).reshape(B * HQ, 1, N).softmax(-1) @ values


def scale_changed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scale = torch.tensor(0.5, dtype=torch.float64)
    scale.mul_(3)
    return ((q @ repeated(k).mT) * scale + bias_of(m)).softmax(-1) @ repeated(v)


def added_numbers(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """A bool or whole number that is added is a number."""
    scores = q @ repeated(k).mT * S
    near = torch.arange(N) % 2 == 0
    return (scores + near + torch.where(m, 0, -100_000)).softmax(-1) @ repeated(v)


def no_head_is_allowed_anything(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    some = m & torch.tensor([True, False, True, True])[:, None, None]
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=some)


@pytest.mark.parametrize("body", [scale_changed, added_numbers, no_head_is_allowed_anything])
def test_rewritten_as_it_is(body: Body) -> None:
    check_step(step_of(body), *given(), tolerance=1e-9)


def keys_changed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Repeated heads are a copy."""
    keys = repeated(k)
    keys.mul_(2)
    return SDPA(q, keys, repeated(v), attn_mask=m)


def buffer_read_between(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    buffer = torch.zeros(k.shape, dtype=k.dtype)
    buffer[..., :2] = k[..., 2:]
    keys = buffer * 2.0
    buffer[..., 2:] = k[..., :2]
    return SDPA(q, repeated(keys), repeated(v), attn_mask=m) + buffer.sum()


def buffer_that_reads_itself(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    buffer = torch.zeros(k.shape, dtype=k.dtype)
    buffer[..., :2] = k[..., 2:]
    buffer[..., 2:] = buffer[..., :2] * 2
    return SDPA(q, repeated(buffer), repeated(v), attn_mask=m)


def through_a_view(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ repeated(k).mT
    scores.mT.mul_(S)
    return (scores + bias_of(m)).softmax(-1) @ repeated(v)


def bias_before_softcap(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    bias = torch.ones(1, 1, N, dtype=q.dtype).cumsum(-1)
    scores = torch.baddbmm(bias.expand(B * HQ, 1, N), merged(q), merged(repeated(k)).mT)
    return ((torch.tanh(scores / 3) * 3).view(B, HQ, 1, N) + bias_of(m)).softmax(-1) @ repeated(v)


REFUSED: dict[Body, str] = {
    keys_changed: "stale-read",
    buffer_read_between: "stale-read",
    buffer_that_reads_itself: "not-commutable",
    through_a_view: "softmax-chain",
    bias_before_softcap: "softmax-chain",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_refused(body: Body) -> None:
    assert codes(step_of(body), *given()) == (0, [REFUSED[body]])


def test_queries_below_a_copy() -> None:
    sites, found = codes(step_of(changed_queries), *given())
    assert sites == 1 or found == ["softmax-chain"]
    if sites:
        check_step(step_of(changed_queries), *given())


def test_a_buffer_for_two_things_in_turn() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        scratch = torch.empty(keys.shape, dtype=keys.dtype)
        scratch[...] = keys * 0.5
        out = SDPA(q, repeated(scratch), repeated(values), attn_mask=mask)
        scratch[...] = values * 0.5
        return out + SDPA(q, repeated(keys), repeated(scratch), attn_mask=mask)

    assert codes(function, *given())[1] == ["stale-read"]
