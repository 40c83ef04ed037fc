"""The documents name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = re.compile(r'(?:Refusal|Rejection)\(\s*"([a-z-]+)"')


def test_every_rejection_has_an_entry() -> None:
    sources = [*(ROOT / "passes").glob("*.py"), *(ROOT / "sfi_compile").glob("*.py")]
    codes = {code for path in sources for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert len(codes) > 20
    entries = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", (ROOT / "docs/rejections.md").read_text(), re.MULTILINE)
    documented = {code for entry in entries for code in re.findall(r"`([a-z-]+)`", entry)}
    assert codes <= documented
