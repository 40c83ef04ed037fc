"""Attention written out that is not known: one rejection each, whatever is strange about it, and none for what is none.

What is known is in `test_chains`; `Body` and the operands are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sfi_compile.config import Config
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from tests.passes.test_chains import HQ, INF, B, Body, D, F, N, S, bias_of, chain, given, repeated, step_of
from tests.passes.toys import codes, matched, minimal, operands, record, tensor


def unknown(change: Callable[[Tensor], Tensor]) -> Body:
    return lambda q, k, v, m: chain(change(q @ repeated(k).mT), repeated(v), m)


REFUSED: dict[str, Body] = {
    "a function of the scores": unknown(lambda s: s.square()),
    "scores over other tokens": unknown(lambda s: s.cumsum(-1)),
    "a scale per token": unknown(lambda s: s * torch.arange(N)),
    "a scale after a mask": unknown(lambda s: s.masked_fill(s.detach() > 9, INF) + (s * 2)),
    "a scale of one product, with a softcap": unknown(lambda s: s.tanh() + s * 2),
    "filled with a number that does not block": unknown(lambda s: s.masked_fill(s.detach() > 1, -2.0)),
    "a limit that matters": unknown(lambda s: s.clamp_min(-1.0)),
    "a softcap of masked scores": lambda q, k, v, m: (
        ((q @ repeated(k).mT + bias_of(m)).tanh() * 2).softmax(-1) @ repeated(v)
    ),
    "sinks that are not cut off": lambda q, k, v, m: (
        torch.cat([q @ repeated(k).mT, torch.zeros(B, HQ, 1, 1).double()], -1).softmax(-1)
        @ torch.cat([repeated(v), repeated(v)[:, :, :1]], 2)
    ),
    "a part of the weights": lambda q, k, v, m: (
        (q @ repeated(k).mT + bias_of(m)).softmax(-1)[..., : N - 1] @ repeated(v)[:, :, : N - 1]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_links_that_are_not_known(name: str) -> None:
    sites, found = codes(step_of(REFUSED[name]), *given())
    assert sites == 0
    assert set(found) <= {"softmax-chain", "not-commutable"}


def test_dropout() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.dropout((q @ repeated(k).mT * S + bias_of(m)).softmax(-1), 0.1) @ repeated(v)

    assert codes(step_of(body), *given()) == (0, ["dropout"])


def test_weights_that_are_masked_again() -> None:
    """Not known, but for what it is: the softmax is there."""

    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ repeated(k).mT).masked_fill(~m, INF).softmax(-1).masked_fill(~m, 0.0) @ repeated(v)

    sites, found = codes(step_of(body), *given())
    assert (sites, found) == (0, ["softmax-chain"])


def test_weights_that_are_also_an_output() -> None:
    """As with `output_attentions=True`: the whole context is read in any case."""

    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ repeated(k).mT * S).masked_fill(~m, INF).softmax(-1)
        return weights @ repeated(v), weights

    assert codes(step_of(body), *given()) == (0, ["weights-used"])


UNKNOWN: dict[str, Callable[..., Tensor]] = {
    "a bound above": lambda s, v: s.clamp(-1e4, 1.0).softmax(-1) @ v,
    "a difference with a factor": lambda s, v: torch.sub(s, s.detach() * 0 + 1, alpha=3).softmax(-1) @ v,
    "a shift under a softcap": lambda s, v: (torch.tanh((s + 2.0) / 3) * 3).softmax(-1) @ v,
    "a shift beside sinks": lambda s, v: torch.cat([s + 2.0, s[..., :1]], -1).softmax(-1)[..., :-1] @ v,
    "weights by a logarithm": lambda s, v: s.log_softmax(-1).exp() @ v,
    "weights by hand": lambda s, v: (s.exp() / s.exp().sum(-1, keepdim=True)) @ v,
    "values by hand": lambda s, v: (s.softmax(-1).mT * v).sum(2, keepdim=True),
}


@pytest.mark.parametrize("tail", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_links_that_are_not_known_are_named(tail: Callable[..., Tensor]) -> None:
    def body(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return tail((q @ repeated(k).mT * S).masked_fill(~m, -1e9), repeated(v))

    sites, found = codes(step_of(body), *given())
    assert sites == 0
    assert set(found) == {"softmax-chain"}


def blocked(scores: Tensor, m: Tensor) -> Tensor:
    """Scores [B, H, N, 1 or nothing], masked."""
    return scores.masked_fill(~(m[:, :, 0] if scores.dim() == 3 else m.mT), INF)


def by_elements(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    weights = blocked((q * repeated(k)).sum(-1), m).softmax(-1)
    return (weights[..., None] * repeated(v)).sum(2, keepdim=True)


def additive(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Bahdanau's: a small network instead of a product."""
    scores = F.linear(torch.tanh(q + repeated(k)), torch.ones(1, D).double())
    return (blocked(scores, m).softmax(2) * repeated(v)).sum(2, keepdim=True)


def in_place(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = (q * repeated(k)).sum(-1)
    scores.mul_(S)
    scores.masked_fill_(~m[:, :, 0], INF)
    return torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), repeated(v))


def of_the_best(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    best = (q @ repeated(k).mT).masked_fill(~m, INF).topk(4, -1)
    chosen = repeated(v).gather(2, best.indices.mT.expand(-1, -1, -1, D))
    return best.values.softmax(-1) @ chosen


def by_logarithms(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    weights = blocked((q * repeated(k)).sum(-1), m).log_softmax(-1).exp()
    return (weights[..., None] * repeated(v)).sum(2, keepdim=True)


LOOSE: dict[str, Body] = {
    "elements": by_elements,
    "an additive score": additive,
    "elements, in place": in_place,
    "distances": lambda q, k, v, m: (
        blocked(-(q - repeated(k)).square().sum(-1), m).softmax(-1)[..., None] * repeated(v)
    ).sum(2, keepdim=True),
    "the best scores": of_the_best,
    "logarithms": by_logarithms,
    "keys first, over another axis": lambda q, k, v, m: blocked(repeated(k) @ q.mT, m).softmax(2).mT @ repeated(v),
    "another axis and elements": lambda q, k, v, m: (blocked(repeated(k) @ q.mT, m).softmax(2) * repeated(v)).sum(
        2, keepdim=True
    ),
    "weights alone": lambda q, k, v, m: blocked((q * repeated(k)).sum(-1), m).softmax(-1),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_softmax_over_the_tokens_of_a_cache(name: str) -> None:
    assert codes(step_of(LOOSE[name]), *given()) == (0, ["softmax-chain"])


def test_a_softmax_over_a_cache_that_grows_or_rolls() -> None:
    def grows(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return ((q * k).sum(-1, keepdim=True).softmax(2) * v).sum(2)

    def rolls(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.copy_(torch.cat([keys[:, :, 1:], k], 2))
        values.copy_(torch.cat([values[:, :, 1:], v], 2))
        return ((q * keys).sum(-1, keepdim=True).softmax(2) * values).sum(2)

    for step in (grows, rolls):
        assert codes(step, *given(query_heads=2)) == (0, ["softmax-chain"])


def test_the_module_is_named_and_other_sites_stay() -> None:
    class Pool(torch.nn.Module):
        def forward(self, q: Tensor, keys: Tensor) -> Tensor:
            return ((q * keys).sum(-1, keepdim=True).softmax(2) * keys).sum(2, keepdim=True)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = Pool()

        def forward(self, *args: Tensor) -> Tensor:
            return minimal(*args) + self.pool(args[0], args[3])

    found = matched(record(Layer(), *operands()).module)
    assert [(r.code, r.where) for r in found.rejections] == [("softmax-chain", "pool")]
    assert len(found.sites) == 1


@pytest.mark.parametrize(("tokens", "is_prompt"), [(2, False), (9, True)])
def test_prompts_are_silent(tokens: int, is_prompt: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        scores = (q[:, :, :, None] * keys[:, :, None]).sum(-1).masked_fill(torch.arange(16) > pos[:, None], INF)
        return (scores.softmax(-1)[..., None] * values[:, :, None]).sum(3)

    new, cached = ([tensor(1, 2, n, D, seed=i) for i in range(3)] for n in (tokens, 16))
    module = record(function, *new, *cached[:2], torch.arange(tokens)).module
    assert pipeline.run(pipeline.SURVEY, Work(Config(), module)).is_prompt is is_prompt


def cross(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A site, and what attends to two more inputs that nobody writes."""
    return lambda q, k, v, keys, values, pos, *others: attend(minimal(q, k, v, keys, values, pos), *others)


def encoded(q: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Keys and values are projected in every step."""
    k = (hidden[:, 0] @ weight).view(B, -1, HQ, D).transpose(1, 2)
    return (q @ k.mT * S).softmax(-1) @ k


CROSS: dict[str, Callable[..., Tensor]] = {
    "cached": lambda q, k, v: (q @ k.mT * S).softmax(-1) @ v,
    "masked": lambda q, k, v: (q @ k.mT + torch.where(torch.arange(5) < 3, 0.0, -1e9)).softmax(-1) @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "of hidden states": lambda q, k, v: encoded(q, k, torch.ones(D, HQ * D)),
    "of one token": lambda q, k, v: (q @ k[:, :, :1].mT * S).softmax(-1) @ v[:, :, :1],
}


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention(name: str) -> None:
    """Written out as with sdpa; over as many tokens as are fed it may be a step's own."""
    others = (tensor(B, HQ, 5, D, seed=8), tensor(B, HQ, 5, D, seed=9))
    found = codes(cross(CROSS[name]), *operands(batch=B, query_heads=HQ, kv_heads=HQ, dim=D), *others)
    assert found == (1, [] if name == "of one token" else ["no-cache-write"])


class Experts(torch.nn.Module):
    """A dense mixture: a router, and a product of its weights with what all experts say; all of it parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(1, D, 6))
        self.up = torch.nn.Parameter(torch.randn(6, D, D))
        self.codebook = torch.nn.Parameter(torch.randn(B, HQ, 6, D))

    def forward(self, *args: Tensor) -> Tensor:
        x = minimal(*args)
        weights = (x.flatten(0, 1) @ self.router).softmax(-1)
        mixed = torch.einsum("nte,nted->ntd", weights, torch.einsum("ntd,edf->ntef", x.flatten(0, 1), self.up))
        return mixed.reshape(x.shape) + (x @ self.codebook.mT).softmax(-1) @ self.codebook


def penalised(x: Tensor, counts: Tensor, token: Tensor) -> Any:
    """Sampling, with a count of what was sampled."""
    counts[:, token] = counts[:, token] + 1.0
    logits = x[:, 0, -1] @ torch.ones(D, 9) - counts
    return logits.softmax(-1), logits.log_softmax(-1), logits.log_softmax(-1).exp()


def recurrent(x: Tensor, state: Tensor) -> Any:
    """A softmax over the features, and one over the slots, of a state that every step rewrites."""
    state.mul_(0.9).add_(x)
    return state.softmax(-1) * x, (x @ state.mT).softmax(-1)


def test_what_is_no_attention_over_a_cache() -> None:
    args = operands(batch=B, query_heads=HQ, kv_heads=HQ, dim=D)
    assert codes(Experts(), *args) == (1, [])

    def sampled(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *more: Tensor) -> Any:
        return penalised(minimal(q, k, v, keys, values, pos), *more)

    def mixed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, state: Tensor) -> Any:
        return recurrent(minimal(q, k, v, keys, values, pos), state)

    assert codes(sampled, *args, torch.zeros(B, 9), torch.tensor([3])) == (1, [])
    assert codes(mixed, *args, tensor(B, HQ, 1, D)) == (1, [])
