"""What must stay dense stays dense, is reported with a code, and computes what it always computed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import sfi_compile
from sfi_compile import diagnostics
from sfi_compile.lab.families import next_step
from tests.decoders import BY_NAME, DENSE, Decoder
from tests.harness import (
    FULL,
    SMALL,
    compiled,
    decode,
    dynamo_graphs,
    eager_lowering,
    prompt,
)

SDPA = torch.nn.functional.scaled_dot_product_attention
SIZE = 24
Step = Callable[..., Tensor]


@pytest.mark.parametrize("decoder", DENSE, ids=lambda d: d.name)
def test_left_alone_and_reported(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = decoder.build()
    ids, fed = prompt(2, 12), prompt(2, 6, 1)
    dense = decode(decoder, model, model.forward, ids, 6, 40, fed)
    with eager_lowering(), caplog.at_level(logging.WARNING, "sfi_compile"):
        ours = decode(decoder, model, compiled(model, **SMALL), ids, 6, 40, fed)
    stats = sfi_compile.stats()
    found = [tuple(r.code for r in graph) for graph in diagnostics.rejected.values()]
    assert found == [decoder.codes] * len(found)
    assert bool(found) == bool(decoder.codes)
    assert set(ours.kinds) == {"dense"}
    if not torch._dynamo.utils.counters["graph_break"]:
        assert dynamo_graphs() <= 2, "a dense graph was pinned to sizes or lengths"
    assert stats.graphs == stats.sites == 0
    torch.testing.assert_close(ours.logits, dense.logits, rtol=1e-5, atol=1e-5)
    for rejection in stats.rejections:
        assert rejection.where != "graph"
        assert rejection.explanation
        assert rejection.hint
        alike = max(graph.count(rejection) for graph in diagnostics.rejected.values())
        assert 1 <= caplog.text.count(str(rejection)) <= alike


def _written(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return (torch.arange(keys.shape[2]) <= pos)[None, None, None]


def plain(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    return SDPA(q, keys, values, attn_mask=_written(keys, values, k, v, pos))


def rank(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q[0], keys[0], values[0], attn_mask=mask[0])


def two_queries(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, attn_mask=mask) + SDPA(torch.cat([q, k], 2), keys, values, attn_mask=mask)


def is_causal(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, is_causal=True)


def heads(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v[:, :1], pos)
    return SDPA(q, keys, values.repeat_interleave(2, dim=1), attn_mask=mask)


def several_roots(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys + extra, values, attn_mask=mask)


def several_writes(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    keys.index_copy_(2, (pos - 1).clamp(min=0), k)
    return SDPA(q, keys, values, attn_mask=mask)


def late_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    out = SDPA(q, keys, values, attn_mask=(torch.arange(keys.shape[2]) <= pos)[None, None, None])
    _written(keys, values, k, v, pos)
    return out


def stale_read(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    before = keys * 2.0
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, before, values, attn_mask=mask)


def cache_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    here = torch.arange(keys.shape[2])[:, None] == pos
    keys.copy_(torch.where(here, k, keys))
    values.copy_(torch.where(here, v, values))
    return SDPA(q, keys, values, attn_mask=(torch.arange(keys.shape[2]) <= pos)[None, None, None])


def no_cache_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    return SDPA(q, keys, values, attn_mask=(torch.arange(keys.shape[2]) <= pos)[None, None, None])


def not_commutable(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys.cumsum(2), values, attn_mask=mask)


def position(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    for _ in range(40):
        pos = (pos + 1) - 1
    return SDPA(q, keys, values, attn_mask=_written(keys, values, k, v, pos))


def no_mask(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    _written(keys, values, k, v, pos)
    return SDPA(q, keys, values)


def mask_shape(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, attn_mask=mask[0, 0])


def mask_heads(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, attn_mask=mask.float().log() + torch.arange(2.0).reshape(1, 2, 1, 1))


def mask_not_commutable(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor
) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, attn_mask=mask.flip(-1).flip(-1))


def mask_written(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos) & True
    mask[..., 0] = False
    return SDPA(q, keys, values, attn_mask=mask)


def flex(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    _written(keys, values, k, v, pos)
    return flex_attention(q, keys, values, lambda score, b, h, i, t: torch.where(t <= pos[0], score, -float("inf")))


def context_work(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, extra: Tensor) -> Tensor:
    mask = _written(keys, values, k, v, pos)
    return SDPA(q, keys, values, attn_mask=mask & mask.any(-1, keepdim=True))


CODES = {"flex": "flex-attention", "cache_write": "rolling-window", "two_queries": "cache-write"}
STEPS = (flex, rank, two_queries, is_causal, several_writes, late_write, stale_read, cache_write,
         no_cache_write, not_commutable, position, mask_not_commutable, mask_written, context_work)  # fmt: skip
REWRITTEN = (several_roots, heads, no_mask, mask_shape, mask_heads)


def run(step: Step, forward: Step, steps: int = 6) -> Tensor:
    """Decode with one attention step over an own cache; outputs in order."""
    shape = (1, 2, SIZE, 4)
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(shape, generator=g)
    values = torch.randn((1, 1, SIZE, 4) if step is heads else shape, generator=g)
    out, extra = [], torch.ones(shape)
    for pos in range(8, 8 + steps):
        q, k, v = torch.randn(3, 1, 2, 1, 4, generator=g)
        out.append(forward(q, k, v, keys, values, torch.tensor([pos]), extra))
    return torch.cat([o.flatten() for o in out])


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_every_code_has_a_small_cause(step: Step) -> None:
    code = CODES.get(step.__name__, step.__name__.replace("_", "-"))
    with torch.no_grad(), eager_lowering():
        ours = run(step, torch.compile(step, backend="sfi", options=SMALL))
    (rejection,) = {r.code: r for r in sfi_compile.stats().rejections}.values()
    assert rejection.code == code
    assert all((rejection.where, rejection.explanation, rejection.hint))
    torch.testing.assert_close(ours, run(step, step))


@pytest.mark.parametrize("step", REWRITTEN, ids=lambda s: s.__name__)
def test_steps_that_need_no_cause(step: Step) -> None:
    """A full memory is dense; without a mask every position is attended to, written or not, so every step is slow."""
    with torch.no_grad(), eager_lowering():
        ours = run(step, torch.compile(step, backend="sfi", options=FULL))
    assert sfi_compile.stats().rejections == ()
    assert sfi_compile.stats().fast_steps == (0 if step is no_mask else 5)
    torch.testing.assert_close(ours, run(step, step))


def test_the_same_step_without_the_cause_is_rewritten() -> None:
    with torch.no_grad(), eager_lowering():
        run(plain, torch.compile(plain, backend="sfi", options=SMALL))
    assert sfi_compile.stats().rejections == ()
    assert sfi_compile.stats().fast_steps == 5


def several_tokens(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return SDPA(q, keys, values, attn_mask=(torch.arange(keys.shape[2]) <= pos[:, None])[None, None])


def several_in_a_slice(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """What is written is a slice of symbolic length."""
    count = q.shape[2]
    keys[:, :, 4 : 4 + count] = k
    values[:, :, 4 : 4 + count] = v
    return SDPA(q, keys, values)


COUNTS: dict[str, tuple[Step, tuple[int, ...], bool | None, list[str], int]] = {
    # step · tokens of each call · dynamic · codes · decode graphs
    "another number": (several_tokens, (3, 3, 5, 4), None, ["symbolic-tokens"], 1),
    "another slice": (several_in_a_slice, (3, 3, 5, 4), None, ["symbolic-tokens"], 1),
    "a prompt before": (several_tokens, (20, 5), None, ["symbolic-tokens"], 0),
    "prompts": (several_tokens, (20, 30, 9), None, [], 0),
    "one number": (several_tokens, (3, 1, 1, 3), None, [], 2),
    "static": (several_tokens, (3, 5), False, [], 2),
    "dynamic": (several_tokens, (3, 3), True, ["symbolic-tokens"], 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_of_tokens_that_is_symbolic(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Dense, but not in silence, in the one graph that Dynamo makes for all numbers of tokens."""
    step, counts, dynamic, expected, graphs = COUNTS[name]
    keys, values = (torch.randn(1, 2, 96, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    with torch.no_grad(), eager_lowering(), caplog.at_level(logging.WARNING, "sfi_compile"):
        forward = torch.compile(step, backend="sfi", options=FULL, dynamic=dynamic)
        for i, count in enumerate(counts):
            new = torch.randn(3, 1, 2, count, 4, generator=torch.Generator().manual_seed(count))
            pos = torch.arange(sum(counts[:i]), sum(counts[: i + 1]))
            wanted = step(*new, keys.clone(), values.clone(), pos)
            torch.testing.assert_close(forward(*new, keys, values, pos), wanted)
    assert [r.code for r in sfi_compile.stats().rejections] == expected
    assert caplog.text.count("left dense") == len(expected)
    assert sfi_compile.stats().graphs == graphs
    assert dynamo_graphs() == 2 - (len(set(counts)) == 1)


@pytest.mark.parametrize("name", ["cohere2", "t5", "mpt", "nanogpt"])
def test_explain_says_what_the_backend_does_and_runs_nothing(name: str) -> None:
    decoder = BY_NAME[name]
    model, _ = decoder.build()
    args, kwargs = next_step(decoder.family, model, prompt(2, 12), 40)
    before = copy.deepcopy((args, kwargs))
    report = sfi_compile.explain(model, *args, options=SMALL, **kwargs)
    assert len(report.sites) == decoder.sites
    assert tuple(r.code for r in report.rejections) == decoder.explained
    for rejection in report.rejections:
        assert str(rejection) in str(report)
    for one, other in zip(_tensors((args, kwargs)), _tensors(before), strict=True):
        assert torch.equal(one, other)
    assert sfi_compile.stats().slow_steps == sfi_compile.stats().graphs == 0


def _tensors(held: object) -> list[Tensor]:
    """All tensors of arguments and of the caches among them."""
    if isinstance(held, Tensor):
        return [held]
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    if not parts and type(held).__module__.startswith("transformers"):
        parts = vars(held).values()
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize("name", ["training", "cohere2", "t5"])
def test_strict_names_every_rejection(name: str) -> None:
    decoder = BY_NAME[name]
    model, _ = decoder.build()
    with eager_lowering(), pytest.raises(Exception, match="strict=True") as caught:
        decode(decoder, model, compiled(model, strict=True, **SMALL), prompt(2, 12), 1, 40)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, sfi_compile.RejectedSitesError)
    assert tuple(r.code for r in error.rejections) == decoder.codes
    for rejection in error.rejections:
        assert str(rejection) in str(error)
