"""sfi_compile: a `torch.compile` backend that makes long-context decoding cheap by slow and fast steps.

`torch.compile(model, backend="sfi")` needs no import of this package. The names below are the whole public interface.
"""

from sfi_compile.accelerate import accelerate
from sfi_compile.boundaries import sentence_boundaries
from sfi_compile.config import PRESETS, Config, OptionError
from sfi_compile.diagnostics import Report, Stats, reset, stats
from sfi_compile.explain import explain
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
