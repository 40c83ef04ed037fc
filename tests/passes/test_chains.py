"""Attention written out in every way that is known: one site each, and slow and fast steps compute the same.

What only looks like attention is in `test_lookalikes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.toys import check_step, codes, matched, operands, record, tensor, written

B, HQ, HKV, N, D = 2, 4, 2, 8, 4
S = D**-0.5
INF = float("-inf")
Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
F = torch.nn.functional


def wide(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The same in float64, so that the same attention differs by rounding of 1e-16 only."""
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def step_of(body: Body) -> Callable[..., Tensor]:
    """Write both caches, then attend: `body(q, keys, values, mask)`."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return body(q, keys, values, written(k, v, keys, values, pos))

    return function


def repeated(t: Tensor) -> Tensor:
    return t[:, :, None].expand(B, HKV, HQ // HKV, N, D).reshape(B, HQ, N, D)


def bias_of(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, INF).double()


def merged(t: Tensor) -> Tensor:
    """Batch and heads in one axis."""
    return t.reshape(-1, *t.shape[2:])


def split(t: Tensor) -> Tensor:
    return t.view(B, HQ, *t.shape[1:])


def chain(scores: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return (scores + bias_of(mask)).softmax(-1) @ values


def half(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """As transformers writes it."""
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * S + bias_of(m)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), repeated(v)).transpose(1, 2).contiguous()


def inplace(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ repeated(k).mT
    scores.mul_(S)
    scores.masked_fill_(~m, INF)
    return scores.softmax(-1) @ repeated(v)


def augmented(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ repeated(k).mT
    scores *= S
    scores += bias_of(m)
    return scores.softmax(-1) @ repeated(v)


def divided(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ repeated(k).mT
    scores /= math.sqrt(D)
    return chain(scores, repeated(v), m)


def softcapped(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ repeated(k).mT * S
    scores = scores / 1.5
    scores = torch.tanh(scores)
    return chain(scores * 1.5, repeated(v), m)


def several_terms(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """A slope per head, a mask added, and a mask filled in."""
    slopes = torch.arange(1, HQ + 1).reshape(1, HQ, 1, 1).double() / 8
    scores = q @ repeated(k).mT * S + slopes * torch.arange(N)
    scores = scores + torch.where(m, 0.0, -1e9).double()
    return scores.masked_fill(torch.arange(N) < 2, INF).softmax(-1) @ repeated(v)


def term_before_scale(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """What is added before a scale is scaled as well."""
    scores = (q @ repeated(k).mT + torch.arange(N).double() * 0.3) * S
    return scores.masked_fill(~m, INF).softmax(-1) @ repeated(v)


def filled_before_scale(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return ((q @ repeated(k).mT).masked_fill(~m, -1e9) / 2).softmax(-1) @ repeated(v)


def with_maximum(how: Callable[[Tensor], Tensor]) -> Body:
    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = q @ repeated(k).mT * S + bias_of(m)
        return (scores - how(scores)).softmax(-1) @ repeated(v)

    return body


def slopes() -> Tensor:
    return torch.arange(1, HQ + 1).reshape(1, HQ, 1, 1).double() / 3


def sinks(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """A column that takes weight and is cut off, as in GPT-OSS."""
    scores = q @ repeated(k).mT * S + bias_of(m)
    column = (torch.arange(HQ).double() / 3 - 0.5).reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
    both = torch.cat([scores, column], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return F.softmax(both, dim=-1)[..., :-1] @ repeated(v)


def baddbmm(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """As Falcon and Bloom write it: the bias goes into the product."""
    bias = bias_of(m).expand(B, HQ, 1, N).reshape(B * HQ, 1, N)
    scores = torch.baddbmm(bias, merged(q), merged(repeated(k)).transpose(1, 2), beta=1.0, alpha=S)
    return split(torch.bmm(scores.softmax(-1), merged(repeated(v))))


def baddbmm_without_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    empty = torch.empty(B * HQ, 1, N, dtype=q.dtype)
    scores = torch.baddbmm(empty, merged(q), merged(repeated(k)).transpose(1, 2), beta=0, alpha=S)
    return split((split(scores) + bias_of(m)).softmax(-1).reshape(B * HQ, 1, N).bmm(merged(repeated(v))))


def grouped(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Five axes, keys and values never repeated."""
    five = q.view(B, HKV, HQ // HKV, 1, D)
    weights = (five @ k[:, :, None].mT * S).masked_fill(~m[:, :, None], INF).softmax(-1)
    return (weights @ v.unsqueeze(2)).reshape(B, HQ, 1, D)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    five = q.view(B, HKV, HQ // HKV, 1, D)
    weights = (torch.einsum("bhgqd,bhkd->bhgqk", five, k) * S).masked_fill(~m[:, :, None], INF).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(B, HQ, 1, D)


def group_as_rows(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """With one token, the queries of a group may stand where the tokens do."""
    rows = q.view(B, HKV, HQ // HKV, D)
    return chain(rows @ k.mT * S, v, m).reshape(B, HQ, 1, D)


CHAINS: dict[str, Body] = {
    "matmul": lambda q, k, v, m: chain(torch.matmul(q, repeated(k).transpose(-1, -2)) * S, repeated(v), m),
    "method": lambda q, k, v, m: (
        (q.matmul(repeated(k).permute(0, 1, 3, 2)).mul(S) + bias_of(m)).softmax(dim=3).matmul(repeated(v))
    ),
    "bias first": lambda q, k, v, m: torch.softmax(bias_of(m) + q @ repeated(k).mT * S, -1) @ repeated(v),
    "scale on queries": lambda q, k, v, m: chain((q * S) @ repeated(k).mT, repeated(v), m),
    "scale on keys": lambda q, k, v, m: chain(q @ (repeated(k) * S).mT, repeated(v), m),
    "scale on both": lambda q, k, v, m: chain((q * S**0.5) @ (repeated(k).mT * S**0.5), repeated(v), m),
    "scale by division": lambda q, k, v, m: chain(q @ repeated(k).mT / math.sqrt(D), repeated(v), m),
    "scale as a constant tensor": lambda q, k, v, m: chain(q @ repeated(k).mT * torch.tensor(S), repeated(v), m),
    "division by a constant tensor": lambda q, k, v, m: chain(
        torch.div(q @ repeated(k).mT, torch.tensor(2.0)), repeated(v), m
    ),
    "number first": lambda q, k, v, m: chain(S * (q @ repeated(k).mT), repeated(v), m),
    "scaled twice": lambda q, k, v, m: chain(q @ repeated(k).mT * 0.25 / 0.5, repeated(v), m),
    "keys first": lambda q, k, v, m: chain((repeated(k) @ q.mT).mT * S, repeated(v), m),
    "keys first, turned last": lambda q, k, v, m: chain((repeated(k) @ q.mT * S).transpose(2, 3), repeated(v), m),
    "values first": lambda q, k, v, m: (repeated(v).mT @ (q @ repeated(k).mT * S + bias_of(m)).softmax(-1).mT).mT,
    "bmm": lambda q, k, v, m: split(
        torch.bmm(
            (split(torch.bmm(merged(q), merged(repeated(k)).mT) * S) + bias_of(m)).softmax(-1).view(B * HQ, 1, N),
            merged(repeated(v)),
        )
    ),
    "baddbmm": baddbmm,
    "baddbmm without bias": baddbmm_without_bias,
    "einsum": lambda q, k, v, m: torch.einsum(
        "bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, repeated(k)) * S + bias_of(m)).softmax(-1), repeated(v)
    ),
    "einsum, tokens before heads": lambda q, k, v, m: torch.einsum(
        "bhqk,bkhd->bqhd",
        (torch.einsum("bqhd, bkhd -> bhqk", q.transpose(1, 2), repeated(k).transpose(1, 2)) * S)
        .masked_fill(~m, INF)
        .softmax(-1),
        repeated(v).transpose(1, 2),
    ),
    "einsum, heads last": lambda q, k, v, m: torch.einsum(
        "bqkh,bkhd->bqhd",
        (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), repeated(k).transpose(1, 2)) * S)
        .masked_fill(~m, INF)
        .softmax(-1)
        .permute(0, 2, 3, 1),
        repeated(v).transpose(1, 2),
    ),
    "five axes": grouped,
    "five axes by einsum": grouped_einsum,
    "group as rows": group_as_rows,
    "masked_fill": lambda q, k, v, m: (
        (q @ repeated(k).mT * S).masked_fill(~m, torch.finfo(q.dtype).min).softmax(-1) @ repeated(v)
    ),
    "where, kept first": lambda q, k, v, m: torch.where(m, q @ repeated(k).mT * S, INF).softmax(-1) @ repeated(v),
    "where, dropped first": lambda q, k, v, m: torch.where(~m, -1e9, q @ repeated(k).mT * S).softmax(-1) @ repeated(v),
    "where, a constant tensor": lambda q, k, v, m: (
        torch.where(m, q @ repeated(k).mT * S, torch.full([], -1e30, dtype=q.dtype)).softmax(-1) @ repeated(v)
    ),
    "subtracted": lambda q, k, v, m: (q @ repeated(k).mT * S - (~m).double() * 1e9).softmax(-1) @ repeated(v),
    "several terms": several_terms,
    "a term before the scale": term_before_scale,
    "filled before the scale": filled_before_scale,
    "a shift of all": lambda q, k, v, m: chain(q @ repeated(k).mT * S + 3.0, repeated(v), m),
    "softcap": softcapped,
    "a scale per head": lambda q, k, v, m: chain(q @ repeated(k).mT * slopes(), repeated(v), m),
    "a quotient per head": lambda q, k, v, m: chain(q @ repeated(k).mT / (slopes() + 1)[0], repeated(v), m),
    "a scale per query, then a softcap": lambda q, k, v, m: chain(
        torch.tanh(q @ repeated(k).mT * q[..., :1]) * 2, repeated(v), m
    ),
    "a scale per row, grouped": lambda q, k, v, m: chain(
        q.view(B, HKV, HQ // HKV, 1, D) @ k[:, :, None].mT * torch.arange(1, B + 1).reshape(B, 1, 1, 1, 1),
        v.unsqueeze(2),
        m[:, :, None],
    ).reshape(B, HQ, 1, D),
    "a sum of products": lambda q, k, v, m: chain(
        (q[..., :1] @ repeated(k)[..., :1].mT + q[..., 1:] @ repeated(k)[..., 1:].mT) * S, repeated(v), m
    ),
    "a sum of scaled products": lambda q, k, v, m: chain(
        q @ repeated(k).mT * S + torch.matmul(q * 2, (k[:, :1] / 3).mT) * 0.25, repeated(v), m
    ),
    "a sum of three, under a softcap": lambda q, k, v, m: chain(
        torch.tanh((q @ repeated(k).mT + q @ repeated(v).mT) / 2 + q.flip(-1) @ repeated(k).mT / 4) * 2, repeated(v), m
    ),
    "in place": inplace,
    "augmented assignment": augmented,
    "augmented division": divided,
    "maximum": with_maximum(lambda t: t.max(-1, keepdim=True).values),
    "amax": with_maximum(lambda t: t.amax(dim=-1, keepdim=True)),
    "sinks": sinks,
    "repeat_interleave": lambda q, k, v, m: chain(q @ k.repeat_interleave(2, 1).mT * S, v.repeat_interleave(2, 1), m),
    "dropout that is off": lambda q, k, v, m: (
        F.dropout((q @ repeated(k).mT * S + bias_of(m)).softmax(-1), 0.0) @ repeated(v)
    ),
    "weights contiguous": lambda q, k, v, m: (
        (q @ repeated(k).mT * S + bias_of(m)).softmax(-1).contiguous() @ repeated(v)
    ),
    "nan_to_num": lambda q, k, v, m: (q @ repeated(k).mT * S + bias_of(m)).softmax(-1).nan_to_num(0.0) @ repeated(v),
    "output turned": lambda q, k, v, m: chain(q @ repeated(k).mT * S, repeated(v), m).transpose(1, 2).reshape(B, 1, -1),
}


def given(**sizes: int) -> tuple[Tensor, ...]:
    return wide(*operands(**{"batch": B, "query_heads": HQ, "kv_heads": HKV, "dim": D, **sizes}))


@pytest.mark.parametrize("name", CHAINS)
def test_every_way_of_writing_it(name: str) -> None:
    check_step(step_of(CHAINS[name]), *given())


def test_as_transformers_writes_it() -> None:
    work = check_step(step_of(half), *given(), tolerance=1e-6)
    (site,) = work.matched.sites
    assert (site.form.name, site.form.repeats_heads, site.kv_heads) == ("softmax chain", True, HKV)


def test_what_the_form_says() -> None:
    def form(body: Body) -> Any:
        (site,) = check_step(step_of(body), *given()).matched.sites
        return site

    plain, cap, bias = form(CHAINS["scaled twice"]), form(softcapped), form(sinks)
    assert (plain.scale, plain.softcap, plain.sinks) == (0.5, 0.0, None)
    assert (cap.scale, cap.softcap) == (0.5, 1.5)
    assert bias.sinks is not None
    assert not form(grouped).form.repeats_heads


@pytest.mark.parametrize("query_heads", [1, 4])
def test_one_key_head(query_heads: int) -> None:
    """Keys of one head broadcast to all queries; or the heads of the queries stand as rows."""

    def broadcast(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return chain(q @ k.mT * S, v, m)

    def rows(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        """As GPT-BigCode writes it."""
        scores = torch.bmm(q.reshape(B, query_heads, D), k.reshape(B, N, D).mT) * S
        scores = scores.view(B, query_heads, 1, N).masked_fill(~m, INF)
        return torch.bmm(scores.softmax(-1).view(B, query_heads, N), v.reshape(B, N, D)).view(q.shape)

    for body in (broadcast, rows):
        (site,) = check_step(step_of(body), *given(kv_heads=1, query_heads=query_heads)).matched.sites
        assert (site.batch, site.query_heads, site.kv_heads) == (B, query_heads, 1)


def test_a_scale_that_the_graph_computes() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, scale: Any) -> Tensor:
        mask = written(k, v, keys, values, pos)
        return chain(q @ repeated(keys).mT * scale, repeated(values), mask)

    check_step(function, *given(), torch.tensor(0.3).double())
    check_step(function, *given(), torch.tensor([0.3]).double())
    check_step(function, *given(), 0.3, dynamic=True)


@pytest.mark.parametrize("name", ["matmul", "einsum", "five axes", "masked_fill", "sinks", "in place"])
def test_several_new_tokens(name: str) -> None:
    """A mask that differs between the queries."""
    q, k, v, keys, values, _ = given()
    q, k, v = (tensor(t.shape[0], t.shape[1], 2, D, seed=i).double() for i, t in enumerate((q, k, v)))

    def five(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        weights = (q.view(B, HKV, HQ // HKV, 2, D) @ k[:, :, None].mT * S).masked_fill(~m[:, :, None], INF).softmax(-1)
        return (weights @ v.unsqueeze(2)).reshape(B, HQ, 2, D)

    def columns(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (q @ repeated(k).mT * S).masked_fill(~m, INF)
        column = torch.arange(HQ).double().reshape(1, -1, 1, 1).expand(B, -1, 2, -1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ repeated(v)

    body = {"five axes": five, "sinks": columns}.get(name, CHAINS[name])

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        return body(q, keys, values, (torch.arange(N) <= pos[:, None])[None, None])

    check_step(function, q, k, v, keys, values, torch.tensor([4, 5]))


def test_latents_beside_rotary_keys() -> None:
    """Absorbed multi-head latent attention: two products over two caches [batch, context, features]."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(1, pos, k)
        values.index_copy_(1, pos, v)
        scores = torch.einsum("bshc,btc->bsht", q[..., :6], keys) + torch.einsum("bshr,btr->bsht", q[..., 6:], values)
        weights = (scores * 0.3).masked_fill(torch.arange(N) > pos, INF).softmax(-1)
        return torch.einsum("bsht,btc->bshc", weights, keys)

    sizes = ((B, 1, HQ, 9), (B, 1, 6), (B, 1, 3), (B, N, 6), (B, N, 3))
    inputs = wide(*(tensor(*size, seed=i) for i, size in enumerate(sizes)))
    (site,) = check_step(function, *inputs, torch.tensor([5])).matched.sites
    assert {w.root.name for w in site.writes} == {"l_keys_", "l_values_"}
    assert (site.query_heads, site.kv_heads, site.key_dim, site.value_dim, site.scale) == (HQ, 1, 9, 6, 0.3)


def test_attention_by_rows_beside_attention_by_heads() -> None:
    """A cache without a batch axis [heads, context, dim], in a graph whose other cache has one."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *bare: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        bare[0].index_copy_(1, pos, k[0])
        bare[1].index_copy_(1, pos, v[0])
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        scores = (out[0] @ bare[0].mT).masked_fill(~mask.squeeze(0), INF)
        return out + (scores.softmax(-1) @ bare[1])[None]

    inputs = given(batch=1, query_heads=HQ, kv_heads=HQ)
    bare = (tensor(HQ, N, D, seed=i).double() for i in (8, 9))
    recorded = record(function, *inputs, *bare)
    found = matched(recorded.module)
    assert (len(found.sites), [r.code for r in found.rejections]) == (1, ["rows"])
    assert found.sites[0].batch == 1


def test_an_output_projection_is_not_another_attention() -> None:
    """Latents are keys and values, and what is attended to is projected up: as absorbed MLA does."""

    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        up = torch.eye(D).double() * 2
        return chain((q @ up) @ repeated(k).mT * S, repeated(k), m) @ up

    assert codes(step_of(body), *given()) == (1, [])
