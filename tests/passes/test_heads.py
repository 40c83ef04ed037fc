"""Head repetition: keys and values before they were repeated to the query heads, or as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.toys import SDPA, check_step, operands, written

B, HQ, HKV, N, D = 2, 6, 2, 8, 4
G = HQ // HKV
Repeat = Callable[[Tensor], Tensor]


def step_of(keys_of: Repeat, values_of: Repeat) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        return SDPA(q, keys_of(keys), values_of(values), attn_mask=mask)

    return function


def given(**sizes: int) -> tuple[Tensor, ...]:
    inputs = operands(**{"batch": B, "query_heads": HQ, "kv_heads": HKV, "dim": D, **sizes})
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def grown(t: Tensor) -> Tensor:
    return t[:, :, None].expand(B, HKV, G, N, D)


STRIPPED: dict[str, Repeat] = {
    "expand and reshape": lambda t: grown(t).reshape(B, HQ, N, D),
    "unsqueeze, expand, flatten": lambda t: t.unsqueeze(2).expand(-1, -1, G, -1, -1).flatten(1, 2),
    "a view with a new axis": lambda t: t.view(B, HKV, 1, N, D).expand(B, HKV, G, N, D).reshape(B, HQ, N, D),
    "repeat of a new axis": lambda t: t[:, :, None].repeat(1, 1, G, 1, 1).view(B, HQ, N, D),
    "repeat_interleave": lambda t: t.repeat_interleave(G, dim=1),
    "repeat_interleave, negative axis": lambda t: torch.repeat_interleave(t, G, -3),
    "contiguous": lambda t: grown(t).reshape(B, HQ, N, D).contiguous(),
    "clone": lambda t: t.repeat_interleave(G, 1).clone(),
}


@pytest.mark.parametrize("name", STRIPPED)
def test_stripped(name: str) -> None:
    (site,) = check_step(step_of(STRIPPED[name], STRIPPED[name]), *given()).matched.sites
    assert (site.kv_heads, site.group, site.form.repeats_heads) == (HKV, G, True)
    assert (site.key.name, site.value.name) == ("l_keys_", "l_values_")


def test_keys_and_values_in_different_ways() -> None:
    step = step_of(STRIPPED["repeat_interleave"], STRIPPED["expand and reshape"])
    assert check_step(step, *given()).matched.sites[0].kv_heads == HKV


ONE: dict[str, Repeat] = {
    "expand": lambda t: t.expand(B, HQ, N, D),
    "repeat": lambda t: t.repeat(1, HQ, 1, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(HQ, 1),
}


@pytest.mark.parametrize("name", ONE)
def test_one_head_for_all(name: str) -> None:
    (site,) = check_step(step_of(ONE[name], ONE[name]), *given(kv_heads=1)).matched.sites
    assert (site.kv_heads, site.group) == (1, HQ)


KEPT: dict[str, Repeat] = {
    "other order": lambda t: t.repeat(1, G, 1, 1),
    "other order, by axes": lambda t: t[:, None].expand(B, G, HKV, N, D).reshape(B, HQ, N, D),
    "picked": lambda t: torch.cat([t[:, :1], t, t + 0, t[:, 1:]], 1),
    "interleaved after a change": lambda t: t.repeat_interleave(G, 1) * torch.arange(HQ).reshape(-1, 1, 1),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    """Query head h reads another head than h // group: the memory holds as many heads as there are queries."""
    (site,) = check_step(step_of(KEPT[name], KEPT[name]), *given()).matched.sites
    assert (site.kv_heads, site.group) == (HQ, 1)


@pytest.mark.parametrize(("keys", "values"), [("expand and reshape", "other order"), ("picked", "repeat_interleave")])
def test_one_repeated_in_order_and_one_not(keys: str, values: str) -> None:
    both = STRIPPED | KEPT
    assert check_step(step_of(both[keys], both[values]), *given()).matched.sites[0].kv_heads == HQ


def test_the_dot_product_repeats_itself() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return SDPA(q, keys, values, attn_mask=written(k, v, keys, values, pos), enable_gqa=True)

    (site,) = check_step(function, *given()).matched.sites
    assert (site.kv_heads, site.form.repeats_heads) == (HKV, False)


def test_heads_that_are_cached_repeated() -> None:
    """Nothing is known of what the cache holds."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), keys, values, pos)
        return SDPA(q, keys, values, attn_mask=mask)

    q, k, v, keys, values, pos = given()
    step = (t.repeat_interleave(G, 1) for t in (keys, values))
    assert check_step(function, q, k, v, *step, pos).matched.sites[0].kv_heads == HQ


def test_a_mask_for_each_query_head() -> None:
    """Heads of one group share keys, not what they may attend to."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, slopes: Tensor) -> Tensor:
        mask = torch.where(written(k, v, keys, values, pos), torch.arange(N) * slopes, float("-inf"))
        return SDPA(q, *(t.repeat_interleave(G, 1) for t in (keys, values)), attn_mask=mask)

    slopes = (torch.arange(HQ).double() / 8 - 0.25).reshape(1, HQ, 1, 1)
    (site,) = check_step(function, *given(), slopes).matched.sites
    assert site.kv_heads == HKV
