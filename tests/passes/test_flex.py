"""flex_attention: its mask function becomes the mask; whatever else it can do is refused. Nothing runs Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.passes.toys import check_step, codes, compiled, matched, operands, record, state, tensor

B, HQ, HKV, N, D = 2, 4, 2, 16, 16
AT = 5


def given(**sizes: int) -> tuple[Tensor, ...]:
    return operands(**{"batch": B, "query_heads": HQ, "kv_heads": HKV, "size": N, "dim": D, "at": AT, **sizes})


def step_of(mask_of: Callable[[Tensor], Any], **more: Any) -> Callable[..., Any]:
    """Write both caches, then flex attention under `mask_of(pos)`, a mask_mod or None."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        mask_mod = mask_of(pos)
        block = None
        if mask_mod is not None:
            block = create_block_mask(mask_mod, None, None, q.shape[2], N, device="cpu")
        return flex_attention(q, keys, values, block_mask=block, enable_gqa=HQ != HKV, **more)

    return function


def causal(pos: Tensor) -> Callable[..., Tensor]:
    """With an offset that is captured."""
    return lambda b, h, q, kv: kv <= q + pos[0]


def windowed(pos: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        last = q + pos[0]
        return (kv <= last) & ((last - kv < 4) | (kv < 2))

    return mask_mod


def by_head(pos: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (kv <= q + pos[0]) & (kv >= h % 2)


@pytest.mark.parametrize("mask_of", [windowed, by_head])
def test_mask_functions(mask_of: Callable[[Tensor], Any]) -> None:
    work = check_step(step_of(mask_of), *given(), tolerance=1e-5)
    (site,) = work.matched.sites
    assert (site.form.name, site.query_heads, site.kv_heads, site.scale) == ("flex_attention", HQ, HKV, D**-0.5)


def test_a_scale() -> None:
    (site,) = check_step(step_of(causal, scale=0.5), *given(), tolerance=1e-5).matched.sites
    assert site.scale == 0.5


def test_a_table_that_the_mask_looks_up() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, valid: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        mask = create_block_mask(lambda b, h, q, kv: (kv <= q + pos[0]) & valid[b, kv], None, None, 1, N, device="cpu")
        return flex_attention(q, keys, values, block_mask=mask, enable_gqa=True)

    valid = torch.ones(B, N, dtype=torch.bool)
    valid[0, :2] = False
    check_step(function, *given(), valid, tolerance=1e-5)


def test_without_a_mask_everything_is_allowed() -> None:
    """So also what lies after the position: the slow step says so, and keeps no memory."""
    recorded = record(step_of(lambda pos: None), *given())
    assert [r.code for r in matched(recorded.module).rejections] == []
    work = compiled(recorded.module, "verify")
    kept = state(work, slow=True)
    found = work.variants[0](*recorded.fresh(), *kept)[0]
    torch.testing.assert_close(found, recorded.module(*recorded.fresh())[0], rtol=0, atol=1e-5)
    assert kept[2].tolist() == [4] * B


def test_several_new_tokens() -> None:
    q, k, v, keys, values, _ = given()
    q, k, v = (tensor(t.shape[0], t.shape[1], 2, D, seed=i) for i, t in enumerate((q, k, v)))
    check_step(step_of(causal), q, k, v, keys, values, torch.tensor([AT - 1, AT]), tolerance=1e-5)


def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * 2


def unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def test_score_functions() -> None:
    assert codes(step_of(causal, score_mod=changed), *given()) == (0, ["flex-attention"])
    assert codes(step_of(causal, score_mod=unchanged), *given()) == (1, [])


def test_a_log_sum_exp_that_is_used() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        out, lse = flex_attention(q, keys, values, enable_gqa=True, return_lse=True)
        return out + lse[..., None]

    assert codes(both, *given()) == (0, ["flex-attention"])


def test_a_mask_that_mixes_positions() -> None:
    def counted(pos: Tensor) -> Callable[..., Tensor]:
        total = (torch.arange(N) <= pos).cumsum(0)
        return lambda b, h, q, kv: total[kv] > 2

    assert codes(step_of(counted), *given()) == (0, ["mask-not-commutable"])
