"""The documents name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = re.compile(r'(?:Refusal|Rejection)\(\s*"([a-z-]+)"')


def codes() -> set[str]:
    """Every code that the sources produce."""
    sources = [path for room in ("passes", "kernels", "sfi_compile") for path in (ROOT / room).rglob("*.py")]
    return {code for path in sources for code in CODE.findall(path.read_text(encoding="utf-8"))}


def test_every_rejection_has_an_entry_and_every_entry_a_rejection() -> None:
    assert len(codes()) > 20
    entries = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", (ROOT / "docs/rejections.md").read_text(), re.MULTILINE)
    documented = {code for entry in entries for code in re.findall(r"`([a-z-]+)`", entry)}
    assert documented == codes()
