"""A template as a plain `@triton.jit` function: what runs under the interpreter, and is compiled without a GPU.

The source is the one that Inductor renders; only the macros around it are other ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import linecache
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import torch
from torch import Tensor

from sfi_compile.kernels.templating import Constant, source

_HEADER = "import triton\nimport triton.language as tl\n\n\n"


@dataclasses.dataclass(frozen=True)
class Operand:
    """What a kernel's code depends on of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Operand:
        """The description of a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> Operand:
        """The description of a contiguous tensor."""
        return cls.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


@functools.cache
def _environment() -> jinja2.Environment:
    # As Inductor's own environment.
    return jinja2.Environment(undefined=jinja2.StrictUndefined)


def render(
    name: str, operands: Mapping[str, Operand], output: Operand | None = None, constants: Mapping[str, Constant] = {}
) -> str:
    """The source of a plain kernel for given operands; their sizes and strides become literals.

    Its parameters are the operands' names in the order given, then `output_ptr` if there is an output.

    Args:
        name: of the template.
        operands: by the names that the template's `def_kernel` lists, in that order.
        output: what `store_output` writes; None for a template that stores by itself.
        constants: `tl.constexpr` names of the kernel, also names in the template.

    Raises:
        FileNotFoundError: no such template.
        ValueError: `def_kernel` lists other names than `operands`.
    """
    stores = 0

    def operand(of: str | None) -> Operand:
        found = output if of is None else operands[of]
        if found is None:
            raise ValueError(f"template {name!r} stores an output and none is given")
        return found

    def def_kernel(*names: str) -> str:
        if names != tuple(operands):
            raise ValueError(f"template {name!r} takes {names}; given: {tuple(operands)}")
        parameters = [*names, *(() if output is None else ("output_ptr",))]
        lines = [f"@triton.jit\ndef {name}({', '.join(parameters)}):"]
        lines += [f"    {key}: tl.constexpr = {value}" for key, value in constants.items()]
        return "\n".join(lines)

    def size(of: str | None, axis: int) -> str:
        return str(operand(of).shape[axis])

    def stride(of: str | None, axis: int | None = None) -> str:
        found = operand(of).stride
        return ", ".join(map(str, found)) if axis is None else str(found[axis])

    def offset(of: str | None, indices: Sequence[str]) -> str:
        found = operand(of).stride
        if len(indices) != len(found):
            raise ValueError(f"template {name!r}: {len(indices)} indices for {len(found)} axes of {of or 'the output'}")
        return " + ".join(f"({index}) * {step}" for index, step in zip(indices, found, strict=True))

    def store_output(
        indices: Sequence[str],
        val: str,
        mask: str | None = None,
        indent_width: int = 4,
        val_shape: Sequence[str] | None = None,
    ) -> str:
        nonlocal stores
        stores += 1
        where = f"offset_{stores}"
        shape = "" if val_shape is None else f" + tl.zeros([{', '.join(val_shape)}], tl.int32)"
        lines = [f"{where} = {offset(None, indices)}{shape}", f"tl.store(output_ptr + {where}, {val}, mask={mask})"]
        return f"\n{' ' * indent_width}".join(lines)

    def load_input(
        input_name: str,
        output_name: str,
        indices: Sequence[str],
        mask: str | None = None,
        other: float = 0.0,
        indent_width: int = 4,
        index_shape: Sequence[str] | None = None,
    ) -> str:
        masked = "" if mask is None else f", mask={mask}, other={other}"
        return f"{output_name} = tl.load({input_name} + {offset(input_name, indices)}{masked})"

    macros = [def_kernel, size, stride, store_output, load_input]
    template = _environment().from_string(source(name))
    return _HEADER + template.render(**constants, **{macro.__name__: macro for macro in macros}) + "\n"


def plain(
    name: str, operands: Mapping[str, Operand], output: Operand | None = None, constants: Mapping[str, Constant] = {}
) -> Any:
    """The kernel of `render` as a `@triton.jit` function (interpreted under `TRITON_INTERPRET=1`).

    Launch it as `plain(...)[grid](*operands, output, num_warps=…, num_stages=…)`.

    Raises:
        FileNotFoundError, ValueError: see `render`.
        ImportError: Triton is not installed.
    """
    return _function(name, render(name, operands, output, constants))


@functools.lru_cache(maxsize=512)
def _function(name: str, text: str) -> Any:
    # Triton reads a kernel's source by `inspect`, which finds it here.
    path = f"<sfi template {name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, Any] = {"__name__": f"sfi_compile.kernels.templates.{name}"}
    exec(compile(text, path, "exec"), space)
    return space[name]
