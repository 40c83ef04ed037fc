"""What happens to a memory when anything but its own steps touches what it was made from, or decodes beside it."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sfi_compile
from tests.decoders import BY_NAME
from tests.harness import FULL, SMALL, compiled, eager_lowering, kind_since, prompt

LLAMA = BY_NAME["llama"]


EDITS: dict[str, Callable[[Any], Any]] = {
    "first keys": lambda layers: layers[0].keys[:, :, :6].zero_(),
    "first values": lambda layers: layers[0].values[:, :, :6].zero_(),
    "last values": lambda layers: layers[-1].values[:, :, :6].zero_(),
    "first keys replaced": lambda layers: setattr(layers[0], "keys", layers[0].keys.clone()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_any_cache_that_is_edited_drops_the_memory(edit: str) -> None:
    model, config = LLAMA.build()
    caches = [transformers.StaticCache(config=config, max_cache_len=64) for _ in range(2)]
    kinds = []
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **FULL)
        for each in caches:
            LLAMA.call(model.forward, prompt(1, 20), each, 0)
        for step, token in enumerate(prompt(1, 6, 1).split(1, dim=1)):
            if step == 3:
                for each in caches:
                    EDITS[edit](each.layers)
            before = sfi_compile.stats()
            ours = LLAMA.call(forward, token.clone(), caches[0], 0)
            kinds.append(kind_since(before))
            torch.testing.assert_close(ours, LLAMA.call(model.forward, token, caches[1], 0), rtol=1e-4, atol=1e-4)
    assert kinds == ["slow", "fast", "fast", "slow", "fast", "fast"]


def test_what_a_slow_step_leaves_is_read_with_the_next_one() -> None:
    """Asking for the counters reads it at once, and must not change what the steps do."""
    model, config = LLAMA.build()
    settings = {**SMALL, "boundary_token_ids": (5, 9)}
    tokens = prompt(2, 24, 1).split(1, dim=1)
    found = []
    for asks in (True, False):
        sfi_compile.reset()
        cache = transformers.StaticCache(config=config, max_cache_len=64)
        with torch.no_grad(), eager_lowering():
            forward = compiled(model, **settings)
            LLAMA.call(model.forward, prompt(2, 20), cache, 0)
            logits = []
            for token in tokens:
                logits.append(LLAMA.call(forward, token.clone(), cache, 0))
                if asks:
                    sfi_compile.stats()
            found.append((torch.cat(logits, 1), sfi_compile.stats()))
    (first, asked), (second, not_asked) = found
    assert torch.equal(first, second)
    assert dataclasses.replace(asked, graphs=0) == dataclasses.replace(not_asked, graphs=0)
    assert asked.refreshes >= 4


class Attending(torch.nn.Module):
    """One attention over a cache of its own; `scale` multiplies the keys, `ahead` opens the mask that far."""

    def __init__(self, length: int = 32, ahead: int = 0) -> None:
        super().__init__()
        self.ahead = ahead
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, length, 4))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        at = position % self.keys.shape[2]
        self.keys[:, :, at] = x
        self.values[:, :, at] = x + 1
        mask = (torch.arange(self.keys.shape[2]) <= position + self.ahead)[None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(x, self.keys * self.scale, self.values, attn_mask=mask)


def attend(model: Attending, steps: int, change: Callable[[int], None] = lambda step: None) -> list[str]:
    """Decode through the backend and eagerly, compare, and tell what the steps were."""
    twin, kinds = copy.deepcopy(model), []
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **FULL, refresh_interval=1000)
        for step in range(steps):
            change(step)
            twin.scale.copy_(model.scale)
            x = torch.randn(1, 2, 1, 4)
            before = sfi_compile.stats()
            ours = forward(x, torch.tensor([step]))
            kinds.append(kind_since(before))
            torch.testing.assert_close(ours, twin(x, torch.tensor([step])), rtol=1e-4, atol=1e-5)
    return kinds


def test_a_scale_that_its_owner_changes() -> None:
    model = Attending()

    def change(step: int) -> None:
        if step == 3:
            model.scale.fill_(2.0)

    assert attend(model, 6, change) == ["slow", "fast", "fast", "slow", "fast", "fast"]


def test_a_ring_buffer_is_dense_once_it_wraps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sfi_compile"):
        kinds = attend(Attending(length=8), 14)
    assert kinds == ["slow"] + ["fast"] * 7 + ["slow"] * 6
    assert caplog.text.count("after the one written") == 1


def test_a_mask_that_is_open_ahead() -> None:
    assert set(attend(Attending(ahead=3), 6)) == {"slow"}


def test_an_interval_longer_than_any_cache() -> None:
    model = Attending()
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, min_context=0, k_head=4, refresh_interval=10**9, recent=10**9, sink=10**9)
        for step in range(4):
            forward(torch.randn(1, 2, 1, 4), torch.tensor([step]))
    assert sfi_compile.stats().memory_bytes < 50_000


def test_threads_with_a_cache_each() -> None:
    model, config = LLAMA.build()
    fed = prompt(1, 30, 1)

    def decode_alone(forward: Any, seed: int) -> Tensor:
        cache = transformers.StaticCache(config=config, max_cache_len=64)
        with torch.no_grad():
            LLAMA.call(model.forward, prompt(1, 20, seed), cache, 0)
            return torch.cat([LLAMA.call(forward, token.clone(), cache, 0) for token in fed.split(1, dim=1)])

    with eager_lowering():
        forward = compiled(model, **FULL)
        decode_alone(forward, 9)  # compiles
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            found = list(threads.map(functools.partial(decode_alone, forward), range(3)))
    for seed, logits in enumerate(found):
        torch.testing.assert_close(logits, decode_alone(model.forward, seed), rtol=1e-4, atol=1e-4)


def test_a_warning_before_dynamo_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    model, config = LLAMA.build()
    with torch.no_grad(), eager_lowering(), caplog.at_level(logging.WARNING, "sfi_compile"):
        forward = compiled(model, **FULL)
        for length in range(30, 38):
            assert "max_cache_len" not in caplog.text
            cache = transformers.StaticCache(config=config, max_cache_len=length)
            LLAMA.call(model.forward, prompt(1, 20), cache, 0)
            LLAMA.call(forward, prompt(1, 1), cache, 0)
    assert caplog.text.count("max_cache_len") == 1


def test_layers_whose_counters_disagree() -> None:
    """Every layer of a static cache counts for itself; a memory has one position."""
    model, config = LLAMA.build()
    caches = [transformers.StaticCache(config=config, max_cache_len=64) for _ in range(2)]
    fed = prompt(1, 24, 1)
    kinds = []
    with torch.no_grad(), eager_lowering():
        forward = compiled(model, **FULL)
        for each in caches:
            LLAMA.call(model.forward, prompt(1, 20), each, 0)
        for step, token in enumerate(fed.split(1, dim=1)):
            shift = {8: -2, 16: 2}.get(step, 0)
            for each in caches:
                each.layers[1].cumulative_length.add_(shift)
            before = sfi_compile.stats()
            ours = LLAMA.call(forward, token.clone(), caches[0], 0)
            kinds.append(kind_since(before))
            dense = LLAMA.call(model.forward, token.clone(), caches[1], 0)
            torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
    assert set(kinds[8:17]) == {"slow"}
    assert kinds[:8].count("fast") == kinds[16:].count("fast") == 7


def test_a_constant_that_is_another_tensor_in_every_step() -> None:
    """Freed memory is used again: the same address, and a version that begins at the same number."""
    torch.manual_seed(0)

    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, pos: Tensor, scale: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, k)
        mask = (torch.arange(keys.shape[2]) <= pos)[None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, keys * scale, values, attn_mask=mask)

    keys, values = torch.randn(2, 1, 2, 32, 4)
    with torch.no_grad(), eager_lowering():
        forward = torch.compile(step, backend="sfi", options=FULL)
        for pos in range(20, 26):
            q, k = torch.randn(2, 1, 2, 1, 4)
            args = q, k, keys, values, torch.tensor([pos])
            expected = step(*copy.deepcopy(args), torch.full((1,), float(pos)))
            torch.testing.assert_close(forward(*args, torch.full((1,), float(pos))), expected)
    assert sfi_compile.stats().fast_steps == 0


def test_positions_that_do_not_follow_each_other() -> None:
    torch.manual_seed(0)

    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, k)
        mask = (torch.arange(keys.shape[2]) <= pos[:, None])[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    keys, values = torch.randn(2, 1, 2, 32, 4)
    with torch.no_grad(), eager_lowering():
        forward = torch.compile(step, backend="sfi", options=FULL)
        for first in (10, 13, 16):
            q, k = torch.randn(2, 1, 2, 3, 4)
            args = q, k, keys, values, torch.tensor([first, 1, first + 2])
            expected = step(*copy.deepcopy(args))
            torch.testing.assert_close(forward(*args), expected)
    assert sfi_compile.stats().fast_steps == 0


def test_a_row_of_which_all_is_blocked_with_a_number() -> None:
    """Its softmax is a mean of all that is allocated, which no memory holds."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, given: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        mask = (given & (torch.arange(keys.shape[2]) <= pos))[:, None, None]
        return (q @ keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ values

    keys, values = (torch.randn(2, 2, 32, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    given, kinds = torch.ones(2, 32, dtype=torch.bool), []
    with torch.no_grad(), eager_lowering():
        forward = torch.compile(step, backend="sfi", options=FULL)
        for pos in range(12, 20):
            given[1] = pos >= 16
            q, k, v = torch.randn(3, 2, 2, 1, 4, generator=torch.Generator().manual_seed(pos))
            args = q, k, v, keys, values, torch.tensor([pos]), given
            expected, before = step(*copy.deepcopy(args)), sfi_compile.stats()
            torch.testing.assert_close(forward(*args), expected)
            kinds.append(kind_since(before))
    assert kinds == ["slow"] * 5 + ["fast"] * 3
