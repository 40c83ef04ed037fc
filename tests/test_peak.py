"""The peak of a call is what it took, though it gave it back; None where the system does not tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sfi_compile.lab import peak

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured on Linux")
@pytest.mark.parametrize("mebibytes", [0, 16, 64])
def test_what_a_call_took(mebibytes: int) -> None:
    def take() -> None:
        torch.ones(mebibytes * MIB, dtype=torch.uint8)

    found = [peak.peak_above(take) for _ in range(2)]
    assert all(size is not None and abs(size - mebibytes * MIB) < 4 * MIB for size in found)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak, "_PROCESS", tmp_path / "none")
    called: list[int] = []
    assert peak.peak_above(lambda: called.append(1)) is None
    assert called == [1], "what was to be measured must still happen"
