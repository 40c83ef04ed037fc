"""Results as JSON lines that a killed run can go on from. Imports `lab.errors` only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sfi_compile.lab.errors import LabError


class Records:
    """Rows, in memory and, if there is a file, on disk.

    Args:
        path: where the rows are kept; those that are there already count. None: in memory alone.

    Raises:
        LabError: the file holds something else, or cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"--json {str(path)!r} cannot be read: {error}") from None
        lines = text.splitlines()
        found = [_record(line) for line in lines]
        cut = bool(text) and not text.endswith("\n")  # a run was killed while it wrote, or somebody edited the file
        for number, row in enumerate(found, 1):
            if row is None and not (cut and 1 < number == len(found)):
                says = f"--json {str(path)!r}, line {number}: no record; allowed: a file that `sfi eval` wrote"
                raise LabError(says)
        self.rows = [row for row in found if row is not None]
        if cut:
            whole = [line for line, row in zip(lines, found, strict=True) if row is not None]
            path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that belong together: they are written at once. Raises LabError if they cannot be."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise LabError(f"--json {str(self.path)!r} cannot be written: {error.strerror}") from None
        self.rows += map(json.loads, text.splitlines())

    def matching(self, key: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Rows that agree with a key in all that it says, one for each passage: the last one written."""
        wanted = json.loads(json.dumps(key))
        rows = [row for row in self.rows if all(name in row and row[name] == value for name, value in wanted.items())]
        return list({row["passage"]: row for row in rows}.values())

    def holds(self, key: Mapping[str, Any]) -> bool:
        """Whether the rows of all passages of a key are there."""
        return len(self.matching(key)) >= int(key["passages"])


def _record(line: str) -> dict[str, Any] | None:
    """The record in a line; None: there is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "passage" in row else None
