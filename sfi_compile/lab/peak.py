"""Memory of this process: its peak, and how far one call lifts it above what was held. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")


def peak_above(call: Callable[[], object]) -> int | None:
    """Bytes between the resident memory held before `call` and the most held during it.

    Only Linux lets a process measure that; None elsewhere. Freed memory is given back first, so that what the call
    takes is seen to be taken.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
        trim(0)
        (_PROCESS / "clear_refs").write_text("5")  # the peak so far is forgotten
    except (OSError, AttributeError, TypeError):
        call()
        return None
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def peak_rss() -> int | None:
    """Largest resident size of this process, in bytes, since it began or `peak_above` was called; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (_PROCESS / "status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
