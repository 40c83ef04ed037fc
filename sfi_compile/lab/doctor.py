"""`sfi doctor`: what is installed, whether the backend is there, and a small decoder that proves that it works.

Imports the package's public names and the lab; needs no model and no transformers.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sfi_compile
from sfi_compile.lab.bench import versions
from sfi_compile.lab.decode import forget_graphs

STEPS = 40
"""Tokens that the self-check decodes."""
CONTEXT = 96
"""Positions that its cache allocates."""
TOLERANCE = 1e-4
"""Largest slow-step error allowed, as a share of the largest logit (float32, two layers)."""
OPTIONS: dict[str, Any] = {
    "min_context": 0,
    "sink": 2,
    "recent": 8,
    "k_head": 8,
    "refresh_interval": 8,
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at: `hint` is what to do if it is not ok."""

    name: str
    ok: bool
    detail: str
    hint: str


def run_doctor(device: str = "cpu") -> dict[str, Any]:
    """Look at everything; keys as in docs/cli.md."""
    checks = [_registered(), _compiler(device)]
    if all(check.ok for check in checks):
        checks.append(self_check(device))
    return {
        "versions": versions(),
        "checks": [dataclasses.asdict(check) for check in checks],
        "ok": all(check.ok for check in checks),
    }


def _registered() -> Check:
    ok = "sfi" in torch.compiler.list_backends(exclude_tags=())
    return Check(
        "backend registered",
        ok,
        "torch.compile(backend='sfi')" if ok else "torch.compile does not list 'sfi'",
        "install the package (pip install sfi-compile), so that its entry point is found",
    )


def _compiler(device: str) -> Check:
    if device == "cuda":
        from torch.utils._triton import has_triton

        ok = has_triton()
        return Check(
            "compiler", ok, "Triton" if ok else "no working Triton", "install the triton that this torch asks for"
        )
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    return Check(
        "compiler",
        found is not None,
        found or f"none of {', '.join(names)} is on the path",
        "install a C++ compiler (g++ or clang++), or name one in the environment variable CXX",
    )


def self_check(device: str = "cpu") -> Check:
    """Decode with `backend="sfi"`; compare every slow step with the same model run eagerly on a copy of the cache."""
    hint = "run again with TORCH_LOGS=dynamo,graph_breaks; report what it prints together with the versions above"
    forget_graphs()
    sfi_compile.reset()
    earlier = sfi_compile.stats().sites
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = _Decoder().eval().to(device)
    caches = [torch.zeros(1, model.kv_heads, CONTEXT, model.head_dim, device=device) for _ in range(2 * model.layers)]
    step: Callable[..., torch.Tensor] = torch.compile(model, backend="sfi", dynamic=False, options=OPTIONS)
    worst = largest = 0.0
    with torch.no_grad():
        for position in range(STEPS):
            token = torch.randint(model.vocab, (1, 1), generator=generator).to(device)
            where = torch.tensor([position], device=device)
            dense = model(token, where, [cache.clone() for cache in caches])
            slow_before = sfi_compile.stats().slow_steps
            logits = step(token, where, caches)
            if sfi_compile.stats().slow_steps > slow_before:
                worst = max(worst, (logits - dense).abs().max().item())
                largest = max(largest, dense.abs().max().item())
    counted = sfi_compile.stats()
    sites = counted.sites - earlier
    detail = (
        f"{sites} sites, {counted.slow_steps} slow and {counted.fast_steps} fast steps, "
        f"slow steps within {worst:.1e} of dense"
    )
    if counted.rejections:
        detail += "; " + "; ".join(map(str, counted.rejections))
    counts = sites == model.layers and counted.slow_steps + counted.fast_steps == STEPS
    ok = counts and counted.slow_steps > 0 and counted.fast_steps > 0 and worst <= TOLERANCE * largest
    return Check("self-check", ok, detail, hint)


class _Decoder(nn.Module):
    """A two-layer decoder with grouped-query attention on a static cache; plain torch."""

    layers, heads, kv_heads, head_dim, vocab = 2, 4, 2, 16, 128

    def __init__(self) -> None:
        super().__init__()
        hidden, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.embed = nn.Embedding(self.vocab, hidden)
        self.query = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(self.layers))
        self.key = nn.ModuleList(nn.Linear(hidden, kv, bias=False) for _ in range(self.layers))
        self.value = nn.ModuleList(nn.Linear(hidden, kv, bias=False) for _ in range(self.layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(self.layers))
        self.head = nn.Linear(hidden, self.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens)
        mask = (torch.arange(CONTEXT, device=tokens.device) <= position[:, None])[None, None]
        for i in range(self.layers):
            h = F.layer_norm(x, x.shape[-1:])
            q, k, v = (
                project(h).view(batch, length, -1, self.head_dim).transpose(1, 2)
                for project in (self.query[i], self.key[i], self.value[i])
            )
            keys, values = caches[2 * i], caches[2 * i + 1]
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            x = x + self.out[i](y.transpose(1, 2).reshape(batch, length, -1))
        return self.head(x)  # type: ignore[no-any-return]
