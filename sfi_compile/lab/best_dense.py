"""The best dense decoding that is to be had, for `sfi bench`: what SFI is compared with beside a user's usual setup.

Two ways: flash attention at the exact length (no repeated heads, no mask), and our own slow steps without selection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sfi_compile.backend import analyse
from sfi_compile.compat.inductor import compile_graph, mode_patches
from sfi_compile.config import Config
from sfi_compile.lab.errors import LabError
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from sfi_compile.passes.insert_guards import InsertGuards

_PASSES = tuple(InsertGuards(refresh=False) if isinstance(p, InsertGuards) else p for p in pipeline.REWRITE)


def kernel_backend(mode: str | None) -> Callable[..., Any]:
    """A Dynamo backend: every step is a slow step of ours that selects and remembers nothing, not even a history."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        config = Config.from_options({"min_context": 0, "policy": "sfi"})
        work = analyse(gm, pipeline.run(pipeline.SURVEY, Work(config, gm)))
        if not work.matched.sites:
            raise LabError(f"no attention site to compare with: {[str(r) for r in work.matched.rejections]}")
        work = pipeline.run(_PASSES, work)
        compiled = compile_graph(
            work.variants[0], [*inputs, *work.added], mode_patches(mode), pipeline.cache_key() + "dense"
        )
        state = {s.name: s.allocate() for s in work.state}
        state["sfi_slow_rows"].fill_(True)
        arguments = tuple(state.values())
        return lambda *args: compiled(*args, *arguments)

    return backend


def use_flash(model: Any, length: int) -> None:
    """Make a transformers decoder attend to exactly the first `length` cached tokens, by flash attention.

    The mask is left out, and the length is a number in the graph: for timing steps around it, not for text.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        keys, values = key[:, :, :length], value[:, :, :length]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sfi_bench_exact", attend)
    AttentionMaskInterface.register("sfi_bench_exact", lambda *args, **kwargs: None)
    model.set_attn_implementation("sfi_bench_exact")
