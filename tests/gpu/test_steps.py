"""Whole steps on a GPU, compiled by Inductor: right in every mode, captured, and waiting for the device once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sfi_compile
from sfi_compile import diagnostics
from sfi_compile.lab.families import build
from tests.decoders import CACHE
from tests.harness import FULL, SMALL, kind_since

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = (None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PROMPT, STEPS, LENGTH = 200, 24, 256
POLICIES = ("sfi", "reach")
"""Selections that have kernels of their own."""


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    sfi_compile.reset()
    yield
    torch.compiler.reset()


def decoder(dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (8, 2), **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_size": 64 * heads[0],
        "head_dim": 64,
    }
    return build("Llama", **sizes, num_hidden_layers=3, **changes)().to("cuda", dtype)


def cache_of(model: Any, length: int = LENGTH) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


def prompt(rows: int, tokens: int = PROMPT) -> Tensor:
    return torch.randint(2, 90, (rows, tokens), generator=torch.Generator().manual_seed(1)).cuda()


class Session:
    """A model, its compiled forward, and a cache that holds a prompt."""

    def __init__(self, model: Any, rows: int, options: dict[str, Any] | None, length: int = LENGTH) -> None:
        self.model, self.cache = model, cache_of(model, length)
        self.forward: Callable[..., Any] = model.forward
        if options is not None:
            self.forward = torch.compile(model.forward, backend="sfi", options=options, dynamic=False)
        with torch.no_grad():
            logits = model(prompt(rows), **{CACHE: self.cache}).logits
        self.next = logits[:, -1:].argmax(-1)
        self.kinds: list[str] = []

    def step(self, token: Tensor | None = None) -> Tensor:
        """Feed a token a row (None: the greedy one); logits [rows, vocab]."""
        before = sfi_compile.stats()
        logits = self.raw(self.next if token is None else token)
        self.kinds.append(kind_since(before))
        logits = logits[:, -1].clone()
        self.next = logits.argmax(-1, keepdim=True)
        return logits

    def raw(self, token: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.forward(token.clone(), **{CACHE: self.cache}).logits
        return out


def wide(model: Any) -> Any:
    """The same model in float64."""
    return copy.deepcopy(model).double()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16", "fp32"))
def test_a_memory_of_everything_is_dense(dtype: torch.dtype, mode: str | None) -> None:
    if dtype != torch.bfloat16 and mode not in (None, "max-autotune"):
        pytest.skip("one dtype a mode is enough")
    model = decoder(dtype)
    reference, eager = Session(wide(model), 2, None), Session(model, 2, None)
    session = Session(model, 2, {**FULL, "refresh_interval": 7, "mode": mode})
    session.next = eager.next = reference.next
    off, budget = 0.0, 1e-6
    for _ in range(STEPS):
        token = reference.next
        wanted, plain, got = reference.step(token), eager.step(token), session.step(token)
        off = max(off, float((got.double() - wanted).abs().max()))
        budget = max(budget, 2 * float((plain.double() - wanted).abs().max()))
    assert off <= budget
    assert session.kinds.count("fast") >= 16
    assert session.kinds.count("slow") >= 3


@pytest.mark.parametrize("policy", ["sfi", "reach", "h2o(decay=0.5)", "topk"])
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_small_memories_as_plain_torch_computes_them(
    heads: tuple[int, int], rows: int, policy: str, monkeypatch: Any
) -> None:
    if policy not in ("sfi", "reach") and heads != (6, 2):
        pytest.skip("one shape of the simpler policies is enough")
    model = decoder(torch.float32, heads)
    ours = Session(model, rows, {**SMALL, "policy": policy, "mode": "reduce-overhead"})
    got = [ours.step() for _ in range(STEPS)]
    torch.compiler.reset()
    monkeypatch.setattr("sfi_compile.passes.lower._without_kernels", lambda work: "switched off")
    plain = Session(model, rows, {**SMALL, "policy": policy})
    wanted = [plain.step() for _ in range(STEPS)]
    assert ours.kinds == plain.kinds
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_waits_for_the_device_once_and_allocates_nothing(policy: str) -> None:
    session = Session(decoder(), 2, {**SMALL, "policy": policy, "refresh_interval": 4, "mode": "reduce-overhead"})
    for _ in range(24):  # every variant is recorded, every question of the guard is captured
        session.raw(prompt(2, 1))
    tokens = [prompt(2, 1) for _ in range(12)]
    waits = 0
    synchronize = torch.cuda.Event.synchronize

    def counted(event: Any) -> None:
        nonlocal waits
        waits += 1
        synchronize(event)

    before = diagnostics.counters.slow_steps, diagnostics.counters.fast_steps
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", counted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                for token in tokens:
                    session.forward(token, **{CACHE: session.cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert waits == len(tokens)
    slow, fast = diagnostics.counters.slow_steps - before[0], diagnostics.counters.fast_steps - before[1]
    assert slow >= 2
    assert fast >= 8
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_alone_is_the_row_in_a_batch(policy: str) -> None:
    """Also where only some rows are slow: a boundary token is fed to one of three."""
    options = {**SMALL, "policy": policy, "min_refresh_gap": 2, "boundary_token_ids": (5,), "mode": "reduce-overhead"}
    model = decoder(torch.float32)
    together = Session(model, 3, options)
    fed = torch.randint(6, 90, (STEPS, 3, 1), generator=torch.Generator().manual_seed(2)).cuda()
    fed[5, 1] = fed[12, 2] = 5
    got = torch.stack([together.step(token) for token in fed], 1)
    stats = sfi_compile.stats()
    assert stats.triggers["boundary"] == 2
    for row in range(3):
        torch.compiler.reset()
        alone = Session(model, 3, options)
        alone.cache = cache_of(model)
        with torch.no_grad():
            model(prompt(3)[row : row + 1], **{CACHE: alone.cache})
        own = torch.stack([alone.step(token[row : row + 1]) for token in fed], 1)
        # Not bit for bit: matrix products of other sizes are other kernels.
        torch.testing.assert_close(own[0], got[row], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_run_twice(policy: str) -> None:
    model = decoder()
    runs = []
    for _ in range(2):
        torch.compiler.reset()
        session = Session(model, 2, {**SMALL, "policy": policy, "mode": "reduce-overhead"})
        runs.append(torch.stack([session.step() for _ in range(STEPS)]))
    assert torch.equal(*runs)


def test_on_a_stream_of_ones_own() -> None:
    model = decoder()
    session = Session(model, 2, {**SMALL, "mode": "reduce-overhead"})
    wanted = torch.stack([session.step() for _ in range(STEPS)])
    torch.compiler.reset()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = Session(model, 2, {**SMALL, "mode": "reduce-overhead"})
        got = torch.stack([aside.step() for _ in range(STEPS)])
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)
    assert "fast" in aside.kinds


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_outputs_stay_what_they_were_as_under_inductor(mode: str | None) -> None:
    """Without CUDA graphs for good; with them until the next step, after which torch raises when they are read."""
    session = Session(decoder(), 1, {**SMALL, "mode": mode})
    for _ in range(8):
        session.step()
    kept = session.raw(session.next)
    copied = kept.clone()
    if mode is None:
        session.step()
        assert torch.equal(kept, copied)
    else:
        session.raw(session.next)
        with pytest.raises(RuntimeError, match="overwritten"):
            kept.clone()


def test_several_tokens_a_step() -> None:
    model = decoder(torch.float32)
    dense = Session(model, 2, None)
    session = Session(model, 2, {**FULL, "refresh_interval": 32, "mode": "reduce-overhead"})
    for number in range(6):
        tokens = prompt(2, 4) + number
        with torch.no_grad():
            wanted = model(tokens, **{CACHE: dense.cache}).logits
        before = sfi_compile.stats()
        got = session.raw(tokens)
        kind = kind_since(before)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert kind == "fast"


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("policy", ["pyramidkv", "random", "snapkv", "reach(ahead=200)"])
def test_policies_without_kernels_run_as_plain_torch(policy: str, mode: str | None) -> None:
    """Slow steps are dense, and so is a memory of everything."""
    model = decoder(torch.float32)
    dense, full = (Session(model, 2, o) for o in (None, {**FULL, "policy": policy, "mode": mode}))
    small = Session(model, 2, {**SMALL, "policy": policy, "mode": mode})
    for _ in range(12):
        token = dense.next
        wanted = dense.step(token)
        torch.testing.assert_close(full.step(token), wanted, rtol=1e-3, atol=1e-3)
        found = small.step(token)
        if len(small.kinds) == 1:  # later, the cache holds what fast steps wrote
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert full.kinds.count("fast") >= 6
    assert small.kinds.count("fast") >= 6
    assert small.kinds.count("slow") >= 2


def test_caches_by_turns_and_a_new_one() -> None:
    model = decoder()
    options = {**SMALL, "mode": "reduce-overhead"}
    one = Session(model, 2, options)
    wanted = torch.stack([one.step() for _ in range(STEPS)])
    other = Session(model, 2, None)
    other.forward = one.forward
    again = Session(model, 2, None)
    again.forward = one.forward
    got = []
    for _ in range(STEPS):
        got.append(again.step())
        if len(got) == 7:
            other.step()
    assert again.kinds[0] == again.kinds[7] == other.kinds[0] == "slow"
    torch.testing.assert_close(torch.stack(got)[:7], wanted[:7])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_step_compiles_no_kernel(policy: str) -> None:
    """What operators launch by themselves was compiled beside the graphs, as its first launch wants it."""
    from sfi_compile.kernels import triton_addresses, triton_attended, triton_pack, triton_scores, triton_top_k
    from sfi_compile.runtime import DecodeRunner

    modules = (triton_addresses, triton_attended, triton_pack, triton_scores, triton_top_k)
    kernels = [x for module in modules for x in vars(module).values() if hasattr(x, "device_caches")]
    counts: list[int] = []

    def compiled_kernels() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    def made(runner: DecodeRunner, *args: Any) -> None:
        counts.append(compiled_kernels())
        initialise(runner, *args)

    initialise = DecodeRunner.__init__
    before = compiled_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeRunner, "__init__", made)
        session = Session(decoder(heads=(15, 5)), 3, {**SMALL, "policy": policy})
        for _ in range(4):
            session.step()
    assert session.kinds[0] == "slow"
    assert before < counts[0] == compiled_kernels()
