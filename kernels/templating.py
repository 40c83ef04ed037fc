"""Where the Triton templates are. Imports nothing of ours; Triton may be missing.

A template lies in `kernels/templates/NAME.py.jinja` and is written as Inductor's own are: `def_kernel`, `size`,
`stride`, `store_output` and so on write what depends on the operands, constants are `tl.constexpr` names in capitals.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "templates"
Constant = bool | int | float | str
_LAST_IMPORT = "import triton.language as tl\n"


def triton_missing() -> bool:
    """Whether Triton is not installed."""
    return importlib.util.find_spec("triton") is None


@functools.cache
def source(name: str) -> str:
    """The Jinja source of a template. Raises FileNotFoundError if there is none of that name.

    One whose first line says `{# functions of MODULE #}` brings along everything in that module of kernels, after its
    imports: what is cached of a compiled graph must not depend on a module that may change.
    """
    text = (FOLDER / f"{name}.py.jinja").read_text(encoding="utf-8")
    found = re.match(r"\{# functions of (\w+) #\}\n", text)
    if found is None:
        return text
    module = (Path(__file__).parent / f"{found[1]}.py").read_text(encoding="utf-8")
    return f"{text[found.end() :]}\n\n{module.partition(_LAST_IMPORT)[2].strip()}\n"
