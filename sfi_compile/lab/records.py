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
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # a run was killed while it wrote
                path.write_text(whole, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"--json {str(path)!r} cannot be read: {error}") from None
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "passage" not in row:
                found = f"--json {str(path)!r}, line {number}: no record; allowed: a file that `sfi eval` wrote"
                raise LabError(found)
            self.rows.append(row)

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
