"""sfi_compile: a `torch.compile` backend that makes long-context decoding cheap by slow and fast steps.

`torch.compile(model, backend="sfi")` needs no import of this package. The names below are the whole public interface;
they are loaded when first used, so that importing the package (and `sfi --help`) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfi_compile.acceleration import accelerate
    from sfi_compile.boundaries import sentence_boundaries
    from sfi_compile.config import PRESETS, Config, OptionError
    from sfi_compile.diagnostics import Report, Stats, reset, stats
    from sfi_compile.inspection import explain
    from sfi_compile.site import RejectedSitesError, Rejection

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Config",
    "OptionError",
    "RejectedSitesError",
    "Rejection",
    "Report",
    "Stats",
    "accelerate",
    "explain",
    "reset",
    "sentence_boundaries",
    "stats",
]

_ROOMS = {
    "acceleration": ("accelerate",),
    "boundaries": ("sentence_boundaries",),
    "config": ("PRESETS", "Config", "OptionError"),
    "diagnostics": ("Report", "Stats", "reset", "stats"),
    "inspection": ("explain",),
    "site": ("RejectedSitesError", "Rejection"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            value = getattr(import_module(f"sfi_compile.{room}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'sfi_compile' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
