"""What looks like attention over a cache and is none, or not what its parts say: no site, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.toys import check_step, codes, compiled, matched, minimal, operands, record, state, tensor, written

N = 8
INF = float("-inf")
F = torch.nn.functional
SIZES = {"batch": 2, "query_heads": 4, "kv_heads": 4, "dim": 4}
Step = Callable[..., Any]


def given(**sizes: int) -> tuple[Tensor, ...]:
    return operands(**{**SIZES, **sizes})


def attended(body: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Step:
    """Write both caches, then `body(q, keys, values, mask)`."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return body(q, keys, values, written(k, v, keys, values, pos))

    return function


def with_attention(rest: Callable[[Tensor], Any]) -> Step:
    """One site, and something else on its output."""
    return lambda q, k, v, keys, values, pos: rest(minimal(q, k, v, keys, values, pos))


def experts(x: Tensor) -> Tensor:
    """A router: softmax, the best two, and a weighted sum of expert outputs."""
    flat = x.reshape(-1, 4)
    weights, chosen = torch.topk(torch.softmax(flat @ torch.eye(4), -1), 2)
    return (weights[..., None] * (flat[:, None] * (1 + chosen[..., None]))).sum(1)


def soft_experts(x: Tensor) -> Tensor:
    """All experts, weighted by a product."""
    flat = x.reshape(-1, 1, 4)
    outputs = flat * torch.arange(1, 5).reshape(1, 4, 1)
    return torch.softmax(flat @ torch.eye(4), -1) @ outputs


def codebook(x: Tensor) -> Tensor:
    return torch.softmax(x @ torch.ones(4, 6), -1) @ torch.ones(6, 4)


def sampling(x: Tensor) -> Tensor:
    logits = x[:, 0, -1] @ torch.ones(4, 9)
    return torch.cumsum(torch.softmax(logits / 0.7, -1).sort(-1).values, -1)


def heads_mixed(x: Tensor) -> Tensor:
    """Talking heads: a softmax over what heads of this step say to each other."""
    turned = x.transpose(1, 2)
    return torch.softmax(turned @ turned.transpose(2, 3), -1) @ turned


BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "a router": experts,
    "a router with a product": soft_experts,
    "a codebook of parameters": codebook,
    "sampling": sampling,
    "heads of one token": heads_mixed,
    "gelu": lambda x: F.gelu(x, approximate="tanh") @ torch.eye(4),
    "a gate": lambda x: torch.tanh(x @ torch.eye(4)) * x,
    "pooling": lambda x: torch.softmax(x @ torch.ones(4, 1), 1).transpose(2, 3) @ x,
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_attention(name: str) -> None:
    assert codes(with_attention(BESIDE[name]), *given()) == (1, [])


@pytest.mark.parametrize("name", BESIDE)
def test_without_attention(name: str) -> None:
    """On a graph's own input, which may be written into: a recurrent state is no cache."""

    def function(x: Tensor, w: Tensor) -> Any:
        x = x + 1
        w.add_(1)
        return BESIDE[name](x * w.mean())

    assert codes(function, tensor(2, 4, 1, 4), tensor(4, 4)) == (0, [])


def product(q: Tensor, keys: Tensor) -> Tensor:
    return q @ keys.transpose(2, 3)


def weights(q: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    return product(q, keys).masked_fill(~mask, INF).softmax(-1)


def later_written(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    w = weights(q, keys, mask)
    w.mul_(2)
    return w @ values


def reused_scores(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The scores change after the softmax was taken: what is kept of them is not what was read."""
    scores = product(q, keys).masked_fill(~mask, INF)
    w = scores.softmax(-1)
    scores.zero_()
    return w @ values + scores.sum()


def keys_changed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Keys are scaled in place between the scores and the product."""
    copied = keys * 1.0
    w = weights(q, copied, mask)
    copied.mul_(3)
    return w @ values + copied.sum()


def queries_changed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    q = q * 1.0
    w = weights(q, keys, mask)
    q.mul_(3)
    return w @ values + q.sum()


def mask_changed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    mask = mask & True
    w = weights(q, keys, mask)
    mask.zero_()
    return w @ values


def cache_zeroed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    w = weights(q, keys, mask)
    values.mul_(0.5)
    return w @ values


def added_after(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Weights with a constant added are no weights."""
    return (weights(q, keys, mask) + 1.0) @ values


def by_token(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(product(q, keys).masked_fill(~mask, -1e9), 1) @ values


def features_first(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A softmax over features of the queries: linear attention."""
    return torch.softmax(q, -1) @ (keys.transpose(2, 3) @ values)


def keys_reversed(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return product(q, keys.flip(2)).masked_fill(~mask, INF).softmax(-1) @ values


def values_rolled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return weights(q, keys, mask) @ values.roll(1, 2)


def one_softmax_two_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    w = weights(q, keys, mask)
    return w @ values + w @ keys


def doubled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Differential attention: the difference of two softmaxes."""
    return (weights(q, keys, mask) - 0.5 * weights(q, keys * 2, mask)) @ values


def weights_returned(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Any:
    w = weights(q, keys, mask)
    return w @ values, w


REFUSED: dict[str, Callable[..., Any]] = {
    "weights written after the softmax": later_written,
    "weights plus one": added_after,
    "softmax over heads": by_token,
    "softmax over features": features_first,
    "keys in reverse": keys_reversed,
    "values rolled": values_rolled,
    "a difference of softmaxes": doubled,
    "the cache written after the softmax": cache_zeroed,
    "keys changed after the scores": keys_changed,
    "queries changed after the scores": queries_changed,
    "the mask changed after the softmax": mask_changed,
}


@pytest.mark.parametrize("name", REFUSED)
def test_never_a_site(name: str) -> None:
    assert codes(attended(REFUSED[name]), *given())[0] == 0


def heads_for_tokens(order: tuple[int, ...]) -> Step:
    """As many heads as positions: a permuted key that swaps them has the shape of a transpose, and is none."""

    def function(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return (q @ keys.permute(order)).masked_fill(~mask, INF).softmax(-1) @ values

    return attended(function)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 1, 2, 3), (2, 1, 3, 0)])
def test_permutations_that_are_no_transposes(order: tuple[int, ...]) -> None:
    """All sizes equal, so that shapes tell nothing: tokens would be contracted, or be heads."""
    args = operands(batch=N, query_heads=N, kv_heads=N, dim=N)
    assert codes(heads_for_tokens(order), *args)[0] == 0


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 3, 1, 2), (1, 0, 3, 2), (3, 1, 0, 2)])
def test_permutations_that_keep_tokens_last(order: tuple[int, ...]) -> None:
    """The transpose, and odd ones that are attention all the same: rows, heads and features change places."""
    args = operands(batch=N, query_heads=N, kv_heads=N, dim=N)
    check_step(heads_for_tokens(order), *(t.double() if t.is_floating_point() else t for t in args))


@pytest.mark.parametrize("body", [one_softmax_two_products, weights_returned, reused_scores])
def test_whatever_is_made_of_it_slow_steps_are_right(body: Callable[..., Any]) -> None:
    """Attention whose weights or scores are used for something else, too."""
    recorded = record(attended(body), *given())
    if not matched(recorded.module).sites:
        return
    work = compiled(recorded.module, "verify", k_head=N)
    found = work.variants[0](*recorded.fresh(), *state(work, slow=True))
    torch.testing.assert_close(found, recorded.module(*recorded.fresh()))


def test_dropout_in_training() -> None:
    def function(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(weights(q, keys, mask), 0.5, training=True) @ values

    assert codes(attended(function), *given()) == (0, ["dropout"])


def test_square_context() -> None:
    """As many queries heads, rows, positions and features: letters, not sizes, say which is which."""

    def turned(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return weights(q, keys, mask) @ values.transpose(2, 3)

    def context_as_features(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return (q @ keys).masked_fill(~mask, INF).softmax(-1) @ values

    args = operands(batch=N, query_heads=N, kv_heads=N, dim=N)
    for body in (turned, context_as_features):
        assert codes(attended(body), *args)[0] == 0
