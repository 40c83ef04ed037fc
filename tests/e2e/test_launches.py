"""What a decode step launches on a GPU, read from the code that Inductor writes for one that is not there."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, fx

from sfi_compile.compat.inductor import COMBINED
from sfi_compile.config import Config
from sfi_compile.lab.families import build
from sfi_compile.passes import counters, linears, lower, pipeline, shared_values
from sfi_compile.passes.base import Work
from sfi_compile.passes.lower import Lower
from tests.decoders import CACHE
from tests.kernels.fake_cuda import Launch, generated_for, launches
from tests.kernels.triton_tools import needs_triton
from tests.passes.toys import compiled, record

pytestmark = needs_triton
BATCH, CONTEXT, WIDTH = 4, 4096, 1024
APPEND, STILL = "torch.ops.sfi.append_rows.default", "torch.ops.sfi.still.default"
OPTIONS = {"min_context": 0, "k_head": 256, "recent": 64}


def launched(step: str, **more: Any) -> tuple[list[Launch], int]:
    """Launches of a slow or fast step of two layers in bfloat16, and the elements of its smallest large state: of one
    memory's keys, or of one history where there are any."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = build("Qwen3", **sizes, head_dim=128, num_hidden_layers=2, max_position_embeddings=CONTEXT)()
    model = model.to(torch.bfloat16)
    works: list[tuple[Work, Sequence[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        work = pipeline.run(pipeline.ANALYSIS, Work(Config.from_options(OPTIONS | more), gm))
        passes = [Lower(kernels=True) if p.name == "lower" else p for p in pipeline.REWRITE]
        on_cpu = [(counters, "combine"), (linears, "combine"), (shared_values, "keep")]
        with contextlib.ExitStack() as stack:
            for module, name in on_cpu:
                pretend = functools.partial(getattr(module, name), device_type="cpu")
                stack.enter_context(mock.patch.object(module, name, pretend))
            works.append((pipeline.run(passes, work, first_stage=len(pipeline.ANALYSIS)), inputs))
        return gm.forward

    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]] * BATCH), **{CACHE: cache})
        torch.compile(model, backend=backend, dynamic=False)(torch.full((BATCH, 1), 6), **{CACHE: cache})
    [(work, inputs)] = works
    module = work.variants[step == "fast"]
    large = [s for s in work.state if s.name in ("sfi_mem_k_0", "sfi_history_0")]
    with torch._inductor.config.patch(COMBINED):
        found = launches(generated_for(module, [*inputs, *work.added]))
    return found, min(s.allocate().numel() for s in large)


def copies_nothing(found: list[Launch], state: int) -> None:
    """Inductor copies what two operators write one after the other, and what it cannot write in place."""
    sizes = [max(launch.numbers) for launch in found if "_tem_" not in launch.name and launch.numbers]
    assert len(sizes) >= 10
    assert max(sizes) < state


def test_a_fast_layer() -> None:
    """Products of q, k and v; norms and rotation of queries and keys, and all writes; attention with its mask, merge;
    output, norm; gate and up, their product, down, norm. After all layers, one that advances their counters."""
    found, state = launched("fast")
    copies_nothing(found, state)
    attention = [
        i for i, x in enumerate(found) if "_tem_" in x.name and "memory_att" in x.name and "_linear_" not in x.name
    ]
    assert len(attention) == 2
    layer = [launch.name for launch in found[slice(*attention)]]
    assert len(layer) <= 13, layer
    assert [launch.name for launch in found if "torch.ops" in launch.name] == [STILL]
    assert found[-1].name.startswith("triton_for")


@pytest.mark.parametrize("preset", ["balanced", "paper-speed"])
def test_a_slow_layer(preset: str) -> None:
    """Of it, Inductor launches everything but the append; the selector and packing come once for all layers."""
    found, state = launched("slow", preset=preset)
    copies_nothing(found, state)
    appends = [i for i, launch in enumerate(found) if launch.name == APPEND]
    assert len(appends) == 2
    layer = [launch.name for launch in found[slice(*appends)] if not launch.name.startswith("torch.ops.sfi.refresh")]
    assert len(layer) <= 16, layer
    assert [name for name in layer if "torch.ops" in name] == [APPEND]


def test_slow_layers_make_their_memories_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "SCRATCH", 1.0)
    found, state = launched("slow")
    copies_nothing(found, state)
    ours = [launch.name for launch in found if launch.name.startswith("torch.ops")]
    assert ours == [STILL, STILL, APPEND, APPEND, "torch.ops.sfi.refresh_rows.default"]


def narrow_caches(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, *caches: Tensor) -> Tensor:
    """Two layers, whose keys and values are computed from caches of eight bits."""
    mask = (torch.arange(CONTEXT) <= pos)[None, None, None]
    for keys, values in zip(caches[::2], caches[1::2], strict=True):
        keys.index_copy_(2, pos, k.to(torch.int8))
        values.index_copy_(2, pos, v.to(torch.int8))
        q = torch.nn.functional.scaled_dot_product_attention(
            q, keys.to(q.dtype) * 0.1, values.to(q.dtype) * 0.1, attn_mask=mask, enable_gqa=True
        )
    return q


def test_keys_and_values_that_are_computed_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "SCRATCH", 1.0)
    heads, width = 4, 128
    q = torch.randn(BATCH, 2 * heads, 1, width, dtype=torch.bfloat16)
    caches = [torch.zeros(BATCH, heads, CONTEXT, width, dtype=torch.int8) for _ in range(4)]
    recorded = record(narrow_caches, q, q[:, :heads], q[:, :heads], torch.tensor([100]), *caches)
    work = Lower(kernels=True).apply(compiled(recorded.module, "verify", k_head=256, recent=64))
    given = [n.meta["example_value"] for n in recorded.graph.nodes if n.op == "placeholder"]
    code = generated_for(work.variants[0], [*given, *work.added])
    made = re.findall(rf"empty_strided_cuda\(\({BATCH}, {heads}, {CONTEXT}, {width}\)", code)
    assert 2 <= len(made) <= 4, f"{len(made)} tensors of the context's size for two layers"
