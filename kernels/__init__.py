"""The numeric room: selector, support and attention as plain torch, and the float64 oracle that holds them to account.

Imports as `sfi_compile.kernels`. Hugging Face publishes a distribution whose import name is also `kernels`; when this
folder is picked up under that bare name (a process started in the repository root), it steps aside for theirs.
"""

from __future__ import annotations

if __name__ == "kernels":
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _here = Path(__file__).resolve().parent.parent
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]
    _spec = PathFinder.find_spec("kernels", _elsewhere)
    if _spec is None or _spec.loader is None:
        # Theirs is not installed. Whoever asks whether it is (transformers does, by looking for this folder and then at
        # the version) finds an empty module too old for anything; raising here would break them at import.
        __version__ = "0"
    else:
        _theirs = importlib.util.module_from_spec(_spec)
        sys.modules["kernels"] = _theirs
        _spec.loader.exec_module(_theirs)
