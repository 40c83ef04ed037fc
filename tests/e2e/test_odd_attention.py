"""Attention written in odd ways, through the backend: right, or left dense with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sfi_compile
from tests.harness import FULL, eager_lowering

SIZE, DIM, AT = 64, 8, 5
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
LEAST = torch.finfo(torch.float32).min


def compare(step: Step, pad: Tensor) -> tuple[str, ...]:
    """Two steps with a memory of everything equal the function's own; the codes of what stayed dense."""
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, SIZE, DIM, generator=g) for _ in range(2))
    own = keys.clone(), values.clone()
    with eager_lowering(), torch.no_grad():
        compiled = torch.compile(step, backend="sfi", options=FULL)
        for at in (AT, AT + 1):
            q, k, v = torch.randn(3, 2, 2, 1, DIM, generator=g)
            got = compiled(q, k, v, keys, values, torch.tensor([at]), pad)
            torch.testing.assert_close(got, step(q, k, v, *own, torch.tensor([at]), pad), rtol=1e-4, atol=1e-5)
    return tuple(rejection.code for rejection in sfi_compile.stats().rejections)


def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return torch.arange(SIZE) <= pos[:, None]


@pytest.mark.parametrize("pads", [-1e9, LEAST])
@pytest.mark.parametrize("fill", [-1e9, LEAST])
def test_padding_that_is_no_better_than_what_is_blocked(pads: float, fill: float) -> None:
    """All that the second row may attend to is padding: its softmax sees equal numbers everywhere."""

    def filled_first(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos)
        return (torch.where(mask, q @ keys.mT * DIM**-0.5, fill) + pad).softmax(-1) @ values

    def padded_first(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos)
        return (q @ keys.mT * DIM**-0.5 + pad).masked_fill(~mask, fill).softmax(-1) @ values

    pad = torch.zeros(2, 1, 1, SIZE)
    pad[1, ..., :10] = pads
    assert compare(filled_first, pad) == ()
    assert compare(padded_first, pad) == ()


def test_a_number_taken_off_before_a_floor_is_no_shift() -> None:
    def step(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        scores = (q @ keys.mT).masked_fill(~write(k, v, keys, values, pos), -1e9)
        return (scores - 7000.0).clamp(min=-6000.0).softmax(-1) @ values

    assert compare(step, torch.zeros(1)) == ("softmax-chain",)


def over_rows(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
    mask = write(k, v, keys, values, pos)
    return (keys @ q.mT).masked_fill(~mask.mT, -math.inf).softmax(2).mT @ values


def tokens_first(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
    mask = write(k, v, keys, values, pos)
    scores = torch.einsum("bhd,bhnd->bnh", q[:, :, 0], keys).masked_fill(~mask[0, None, :, None], -math.inf)
    return torch.einsum("bnh,bhnd->bhd", scores.softmax(1), values)


def elementwise(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
    mask = write(k, v, keys, values, pos)
    return (keys.unsqueeze(3) * q.unsqueeze(2)).sum(-1).masked_fill(~mask.mT, -math.inf).softmax(2).mT @ values


def softmin(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
    mask = write(k, v, keys, values, pos)
    return torch.nn.functional.softmin(torch.cdist(q, keys).masked_fill(~mask, math.inf), -1) @ values


@pytest.mark.parametrize("step", [over_rows, tokens_first, elementwise, softmin])
def test_a_context_longer_than_any_step_hides_no_softmax(step: Step) -> None:
    assert compare(step, torch.zeros(1)) == ("softmax-chain",)


def test_queries_of_one_step_that_see_other_tokens() -> None:
    """A mask given to the step, as for a tree of drafts: a token that the last query may not see is remembered, too."""
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, SIZE, DIM, generator=g) for _ in range(2))
    own = keys.clone(), values.clone()

    def step(q, k, v, keys, values, pos, seen):  # type: ignore[no-untyped-def]
        write(k, v, keys, values, pos)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)

    slots = torch.arange(SIZE)
    with eager_lowering(), torch.no_grad():
        compiled = torch.compile(step, backend="sfi", options=FULL)
        for at in range(20, 30, 2):
            pos = torch.tensor([at, at + 1])
            seen = ((slots <= pos[:, None]) & (slots % 2 == pos[:, None] % 2))[None, None]
            q, k, v = torch.randn(3, 1, 2, 2, DIM, generator=g)
            got = compiled(q, k, v, keys, values, pos, seen)
            torch.testing.assert_close(got, step(q, k, v, *own, pos, seen), rtol=1e-4, atol=1e-5)
    stats = sfi_compile.stats()
    assert (stats.slow_steps, stats.fast_steps) == (1, 4)


def test_vmap_beside_attention() -> None:
    """It enters and leaves by calls that nothing uses."""

    def step(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos)
        q = q + torch.vmap(lambda x: x.softmax(-1))(q)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    assert compare(step, torch.zeros(1)) == ()
    assert sfi_compile.stats().sites == 1


def test_attention_inside_vmap() -> None:
    def step(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos)

        def attend(q, k, v):  # type: ignore[no-untyped-def]
            return (q @ k.mT).masked_fill(~mask, -1e9).softmax(-1) @ v

        return torch.vmap(attend)(q, keys, values)

    assert compare(step, torch.zeros(1)) == ("nested-graph",)


def test_written_out_in_a_graph_of_its_own() -> None:
    def attend(q, keys, values, mask):  # type: ignore[no-untyped-def]
        return (q @ keys.mT * DIM**-0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ values

    def step(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos)
        return torch.utils.checkpoint.checkpoint(attend, q, keys, values, mask, use_reentrant=False)

    assert compare(step, torch.zeros(1)) == ("nested-graph",)


def test_nan_that_becomes_another_number_than_zero() -> None:
    def step(q, k, v, keys, values, pos, pad):  # type: ignore[no-untyped-def]
        mask = write(k, v, keys, values, pos) & (pad == 0)
        return (q @ keys.mT).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(nan=0.01) @ values

    pad = torch.zeros(2, 2, 1, SIZE)
    pad[1, 0] = 1
    assert compare(step, pad) == ("softmax-chain",)
