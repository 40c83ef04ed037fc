"""Which operands the kernels take, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfi_compile.kernels import lowering, templating


def reason(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (9, 0),
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 128,
    heads: int = 8,
    shared: int = 232_448,
) -> str | None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(lowering.inductor, "shared_memory", lambda _: shared)
    with FakeTensorMode():
        q = torch.empty(1, heads, 1, width, device=device, dtype=dtype)
        memory = torch.empty(1, 2, 64, width, device=device, dtype=dtype)
    found = lowering.supports(q, memory, memory)
    return None if found is None else found.code


def test_what_there_is_a_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch) is None
    assert reason(monkeypatch, capability=(8, 0), dtype=torch.float32, width=256) is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"device": "cpu"}, "kernel-device"),
        ({"capability": (7, 5)}, "kernel-device"),
        ({"shared": 1024}, "kernel-device"),
        ({"dtype": torch.float64}, "kernel-dtype"),
        ({"width": 320}, "kernel-width"),
        ({"heads": 4096}, "kernel-rows"),
    ],
)
def test_what_there_is_none_for(change: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch, **change) == code


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templating, "triton_missing", lambda: True)
    assert reason(monkeypatch) == "kernel-triton"
