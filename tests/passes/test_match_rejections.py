"""match: every reason to leave attention dense, on small hand-written steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from sfi_compile.config import Config
from sfi_compile.passes import pipeline, reads
from sfi_compile.passes.base import Work
from tests.passes.toys import SDPA, codes, matched, minimal, operands, record, tensor, written
from tests.test_docs import codes as all_codes

N = 8
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def rewritten(**changes: Callable[..., Any]) -> Step:
    """The minimal step with other arguments of sdpa, each a function of q, keys, values, mask, pos."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        arguments: dict[str, Any] = {"query": q, "key": keys, "value": values, "attn_mask": mask}
        arguments |= {name: change(q, keys, values, mask, pos) for name, change in changes.items()}
        return SDPA(**arguments)

    return function


def three_axes(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return SDPA(q[0], keys[0], values[0], attn_mask=written(k, v, keys, values, pos)[0])


def unknown_chain(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = written(k, v, keys, values, pos)
    scores = (q @ keys.transpose(2, 3)).square().masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ values


def split_chain(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """What a graph break between product and softmax leaves."""
    mask = written(k, v, keys, values, pos)
    return (q @ keys.transpose(2, 3)).masked_fill(~mask, float("-inf"))


def chain_with_dropout(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = written(k, v, keys, values, pos)
    scores = (q @ keys.transpose(2, 3)).masked_fill(~mask, float("-inf"))
    return torch.dropout(scores.softmax(-1), 0.5, True) @ values


def rewritten_between(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Written out, and the cache is written between scores and weights."""
    keys.index_copy_(2, pos, k)
    weights = (q @ keys.transpose(2, 3)).masked_fill(torch.arange(N) > pos, float("-inf")).softmax(-1)
    values.index_copy_(2, pos, v)
    return weights @ values


def opaque(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    written(k, v, keys, values, pos)
    w, b = torch.ones(6, 2), torch.zeros(6)
    f = torch.nn.functional.multi_head_attention_forward
    k, v = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    return f(q[0], k, v, 2, 1, w, b, None, None, False, 0.0, w[:2], b[:2])[0]


def unwritten(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return SDPA(q, keys, values, attn_mask=(torch.arange(N) <= pos)[None, None, None])


def by_elements(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    weights = ((q * keys).sum(-1) + torch.where(torch.arange(N) <= pos, 0.0, -torch.inf)).exp()
    written(k, v, keys, values, pos)
    return (weights[..., None] * values).sum(2, keepdim=True) / weights.sum(-1)[..., None, None]


def hidden(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Attention in one call of aten."""
    mask = written(k, v, keys, values, pos)
    return torch.ops.aten._scaled_dot_product_attention_math(q, keys, values, mask)[0]


def functional(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    """New caches are returned."""
    keys, values = keys.index_copy(2, pos, k), values.index_copy(2, pos, v)
    return (q @ keys.mT).masked_fill(torch.arange(N) > pos, -torch.inf).softmax(-1) @ values, keys, values


def paged(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Positions first, found in a table of blocks."""
    table = torch.arange(N) * 3 % N
    pages = keys[0].transpose(0, 1)
    pages[table[pos]] = k[0].transpose(0, 1)
    return SDPA(q, pages[table].transpose(0, 1)[None], pages[table].transpose(0, 1)[None])


def growing(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return SDPA(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))


def twice(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    written(k, v, keys, values, pos - 1)
    return SDPA(q, keys, values, attn_mask=written(k, v, keys, values, pos))


def late(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    out = unwritten(q, k, v, keys, values, pos)
    written(k, v, keys, values, pos)
    return out


def stale(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    early = keys * 2
    return SDPA(q, early, values, attn_mask=written(k, v, keys, values, pos))


def scaled_later(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """What is gathered from the cache would miss the second factor."""
    mask = written(k, v, keys, values, pos)
    expanded = keys * 2
    expanded.mul_(3)
    return SDPA(q, expanded, values, attn_mask=mask)


def masked_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = written(k, v, keys, values, pos)
    keys.masked_fill_(~mask.transpose(2, 3), 0)
    return SDPA(q, keys, values, attn_mask=mask)


def copied(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.copy_(torch.where(torch.arange(N)[:, None] == pos, k, keys))
    values.copy_(torch.where(torch.arange(N)[:, None] == pos, v, values))
    return unwritten(q, k, v, keys, values, pos)


def two_positions(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    pair = torch.cat([pos - 1, pos])
    keys.index_copy_(2, pair, k.expand(1, 1, 2, 2))
    values.index_copy_(2, pair, v.expand(1, 1, 2, 2))
    return unwritten(q, k, v, keys, values, pos)


def two_positions_of_one_token(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys[:, :, torch.cat([pos - 1, pos])] = k
    values[:, :, pos] = v
    return unwritten(q, k, v, keys, values, pos)


def rolled(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.copy_(torch.cat([keys[:, :, 1:], k], 2))
    values.copy_(torch.cat([values[:, :, 1:], v], 2))
    return SDPA(q, keys, values)


def scores_doubled(score: Tensor, *_: Tensor) -> Tensor:
    return score * 2


def copied_and_scaled(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """A copy of the cache is changed in place; and one that has its axes in another order."""
    mask = written(k, v, keys, values, pos)
    turned = keys.transpose(2, 3).contiguous()
    turned.mul_(2)
    return SDPA(q, turned.transpose(2, 3), values, attn_mask=mask)


def normalised_over_tokens(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Every token changes what is subtracted from all."""
    mask = written(k, v, keys, values, pos)
    return SDPA(q, keys - keys.mean(2, keepdim=True), values, attn_mask=mask)


def flex(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    written(k, v, keys, values, pos)
    return flex_attention(q, keys, values, score_mod=scores_doubled)


def long_position(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    for _ in range(reads.MOST_POSITION_NODES):
        pos = pos + 0
    return minimal(q, k, v, keys, values, pos)


def advanced_too_early(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """The input holds the position before this step's; the write uses the one after."""
    pos.add_(1)
    return minimal(q, k, v, keys, values, pos)


def advanced_too_late(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Written at one position, and at the attention node the input holds the next."""
    mask = written(k, v, keys, values, pos)
    pos.add_(1)
    return SDPA(q, keys, values, attn_mask=mask)


def reused_value(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """What was cached is no longer what its name holds."""
    mask = written(k, v, keys, values, pos)
    k.mul_(2)
    return SDPA(q, keys, values, attn_mask=mask)


def accumulated(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = written(k, v, keys, values, pos)
    mask &= (torch.arange(N) > 0)[None, None, None]
    return SDPA(q, keys, values, attn_mask=mask)


def filled(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, 1, N)
    mask.masked_fill_(~written(k, v, keys, values, pos), float("-inf"))
    return SDPA(q, keys, values, attn_mask=mask)


def counted_later(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """The mask holds for the old length; at the attention node the length has moved on."""
    mask = (torch.arange(N) >= pos - 2)[None, None, None] & (torch.arange(N) <= pos)[None, None, None]
    at = pos + 0
    pos.add_(1)
    written(k, v, keys, values, at)
    return SDPA(q, keys, values, attn_mask=mask)


def running_scale(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """De-quantisation with a scale that every step may raise."""
    scale = torch.ones(1)
    scale.copy_(torch.maximum(scale, v.abs().amax()))
    mask = written(k, v, keys, values, pos)
    return SDPA(q, keys, values * scale, attn_mask=mask)


def decayed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = written(k, v, keys, values, pos)
    decay = torch.exp((torch.arange(N) - pos).float())[:, None]
    return SDPA(q, keys * decay, values, attn_mask=mask)


def other_bits(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """A view with the same shape that reads other numbers."""
    mask = written(k, v, keys, values, pos)
    return SDPA(q, keys.view(torch.int32).to(q.dtype), values, attn_mask=mask)


def checkpointed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    mask = written(k, v, keys, values, pos)
    return torch.utils.checkpoint.checkpoint(SDPA, q, keys, values, mask, use_reentrant=False)


CODES: list[tuple[str, Step, dict[str, int]]] = [
    ("rank", three_axes, {}),
    ("query-length", rewritten(query=lambda q, *_: q.expand(1, 1, 9, 2)), {}),
    ("cache-write", rewritten(query=lambda q, *_: q.expand(1, 1, 3, 2)), {}),
    ("dropout", rewritten(dropout_p=lambda *_: 0.1), {}),
    ("dropout", chain_with_dropout, {}),
    ("is-causal", rewritten(is_causal=lambda *_: True, attn_mask=lambda *_: None), {}),
    ("heads", rewritten(key=lambda q, k, *_: k[:1] * 1.0, value=lambda q, k, v, *_: v[:1] * 1.0), {"batch": 2}),
    ("no-cache-write", unwritten, {}),
    ("growing-cache", growing, {}),
    ("unknown-attention", by_elements, {}),
    ("unknown-attention", hidden, {}),
    ("unknown-attention", paged, {}),
    ("unknown-attention", functional, {}),
    ("rolling-window", rolled, {}),
    ("rolling-window", copied, {}),
    ("not-commutable", rewritten(key=lambda q, k, *_: k.roll(1, 2)), {}),
    ("not-commutable", rewritten(value=lambda q, k, v, *_: v.cumsum(2)), {}),
    ("not-commutable", other_bits, {}),
    ("changing-operand", running_scale, {}),
    ("changing-operand", decayed, {}),
    ("changing-operand", normalised_over_tokens, {}),
    ("changing-operand", rewritten(key=lambda q, k, v, mask, pos: k * pos), {}),
    ("several-writes", twice, {}),
    ("several-writes", masked_write, {}),
    ("late-write", late, {}),
    ("stale-read", stale, {}),
    ("stale-read", scaled_later, {}),
    ("stale-read", copied_and_scaled, {}),
    ("stale-read", reused_value, {}),
    ("stale-read", rewritten_between, {}),
    ("cache-write", two_positions, {}),
    ("cache-write", two_positions_of_one_token, {}),
    ("position", long_position, {}),
    ("position", advanced_too_early, {}),
    ("position", advanced_too_late, {}),
    ("mask-not-commutable", rewritten(attn_mask=lambda q, k, v, mask, *_: mask.cumsum(-1) > 0), {}),
    ("mask-not-commutable", rewritten(attn_mask=lambda q, k, v, mask, *_: mask.flip(-1)), {}),
    (
        "mask-not-commutable",
        rewritten(attn_mask=lambda q, k, v, mask, *_: mask.repeat_interleave(2, 1)),
        {"query_heads": 2},
    ),
    ("mask-written", accumulated, {}),
    ("mask-written", filled, {}),
    ("mask-written", counted_later, {}),
    ("softmax-chain", unknown_chain, {}),
    ("split-attention", split_chain, {}),
    ("opaque-module", opaque, {}),
    ("flex-attention", flex, {}),
    ("nested-graph", checkpointed, {}),
]
ELSEWHERE = {
    "mask-shape": "here, in an edited graph",
    "dtype": "here, in an edited graph",
    "gradients": "tests/test_diagnostics.py",
    "context-too-short": "tests/e2e/test_options.py",
    "no-attention": "tests/test_diagnostics.py",
    "graph-break": "tests/e2e/test_rejections.py",
    "context-work": "tests/e2e/test_rejections.py",
    "symbolic-tokens": "tests/e2e/test_rejections.py",
    "mask-opens": "tests/passes/test_openings.py",
    "rows": "tests/passes/test_chains.py",
    "weights-used": "tests/passes/test_chains.py",
    "kernel-fill": "tests/passes/test_lower.py",
    "kernel-policy": "tests/passes/test_lower.py",
    "kernel-window": "tests/passes/test_lower.py",
    **dict.fromkeys(("kernel-triton", "kernel-device", "kernel-dtype"), "tests/kernels/test_supports.py"),
    **dict.fromkeys(("kernel-width", "kernel-rows"), "tests/kernels/test_supports.py"),
}


@pytest.mark.parametrize(("code", "function", "sizes"), CODES, ids=[f"{c}-{f.__name__}" for c, f, _ in CODES])
def test_reasons_to_stay_dense(code: str, function: Step, sizes: dict[str, int]) -> None:
    found = matched(record(function, *operands(**sizes)).module)
    assert [r.code for r in found.rejections] == [code]
    assert (found.sites, found.guard) == ((), None)
    assert found.rejections[0].explanation
    assert found.rejections[0].hint


def test_every_code_is_produced_by_a_test() -> None:
    assert {code for code, _, _ in CODES} | set(ELSEWHERE) == all_codes()


ACCEPTED: dict[str, Step] = {
    "a mask of three axes": rewritten(attn_mask=lambda q, k, v, mask, *_: mask.squeeze(0)),
    "a mask of two axes": rewritten(attn_mask=lambda q, k, v, mask, *_: mask.reshape(1, N)),
    "a mask for each head": rewritten(attn_mask=lambda q, k, v, mask, *_: mask.expand(1, 2, 1, N)),
    "a mask of one column": rewritten(attn_mask=lambda q, k, v, mask, pos: (pos >= 0).reshape(1, 1, 1, 1)),
    "no mask": rewritten(attn_mask=lambda *_: None),
    "keys of two caches": rewritten(key=lambda q, k, v, *_: k + v),
    "axes named by keyword": rewritten(key=lambda q, k, *_: k.permute(dims=(0, 1, 2, 3))),
    "a computed scale": rewritten(query=lambda q, *_: q * torch.sqrt(torch.tensor(2.0))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_reason_to_stay_dense(name: str) -> None:
    assert codes(ACCEPTED[name], *operands(query_heads=2, kv_heads=2)) == (1, [])


def test_reasons_that_only_an_edited_graph_has() -> None:
    """Dynamo refuses mixed types and odd masks itself; the matcher does not rely on it."""
    recorded = record(minimal, *operands())
    for name, code, change in (
        ("l_q_", "dtype", lambda t: t.to(torch.float16)),
        ("l_pos_", "position", lambda t: t.to(torch.float16)),
        ("mask", "mask-shape", lambda t: t.expand(1, 1, 3, N)),
        ("mask", "mask-shape", lambda t: t.expand(2, 2, 1, 1, N)),
    ):
        node = recorded.node(name)
        kept = node.meta["example_value"]
        node.meta["example_value"] = change(kept)
        assert [r.code for r in matched(recorded.module).rejections] == [code]
        node.meta["example_value"] = kept
    assert len(matched(recorded.module).sites) == 1


def test_sites_and_rejections_side_by_side() -> None:
    def cross(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, other: Tensor) -> Tensor:
        out = minimal(q, k, v, keys, values, pos)
        return SDPA(out, other, other)

    found = matched(record(cross, *operands(), tensor(1, 1, 5, 2)).module)
    assert len(found.sites) == 1
    assert [r.code for r in found.rejections] == ["no-cache-write"]
    assert found.guard is not None


@pytest.mark.parametrize(("length", "expected"), [(1, False), (8, False), (9, True)])
def test_prompts(length: int, expected: bool) -> None:
    def is_prompt(*args: Any) -> bool:
        return pipeline.run(pipeline.SURVEY, Work(Config(), record(*args).module)).is_prompt

    assert is_prompt(rewritten(query=lambda q, *_: q.expand(1, 1, length, 2)), *operands()) is expected
    assert not is_prompt(lambda t: t * 2, tensor(2)), "a graph without attention is no prompt"
