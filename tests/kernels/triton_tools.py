"""Triton without a GPU: kernels interpreted, in a process of their own, and compiled for a GPU that is not there.

A template's kernel is given as name, operands, output and constants, as `rendering` takes them.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from sfi_compile.kernels import templating
from sfi_compile.kernels.templating import Constant
from tests.kernels import rendering
from tests.kernels.rendering import Operand

Result = TypeVar("Result")
needs_triton = pytest.mark.skipif(templating.triton_missing(), reason="needs triton")
TARGETS = (80, 90, 100)
"""Compute capabilities that every configuration must compile for: A100, H100 and H200, B200."""
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    """A process that has `TRITON_INTERPRET=1`: Triton reads it when kernels, its own included, are defined."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(os.getpid).result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    atexit.register(pool.shutdown)
    return pool


def interpreted(function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)` where Triton kernels are interpreted on CPU tensors. A function that a module holds by name."""
    return _interpreter().submit(_single_threaded, function, *args).result()


def _single_threaded(function: Callable[..., Result], *args: Any) -> Result:
    torch.set_num_threads(1)
    _teach_bfloat16()
    return function(*args)


@functools.cache
def _teach_bfloat16() -> None:
    """The interpreter keeps bfloat16 as integers: `dot` multiplies those, and casts to it cut digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar is tl.bfloat16 and x.dtype.scalar is tl.float32:
            bits = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits, tl.bfloat16)
        return cast(self, x, dtype)

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar is tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    builder.cast_impl, builder.create_dot = rounded, multiplied


def launch(
    name: str,
    grid: tuple[int, ...],
    operands: Mapping[str, Tensor],
    output: Tensor | None = None,
    constants: Mapping[str, Constant] = {},
) -> Tensor | None:
    """Run a template's kernel as a plain one (inside `interpreted`, on CPU tensors); returns `output`."""
    described = {key: Operand.of(x) for key, x in operands.items()}
    kernel = rendering.plain(name, described, None if output is None else Operand.of(output), constants)
    kernel[grid](*operands.values(), *(() if output is None else (output,)))
    return output


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a multiprocessor."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes of stack per thread: kernels have no other use for it."""
    shared: int
    """Bytes per program."""


def compiled(
    capability: int,
    name: str,
    operands: Mapping[str, Operand],
    output: Operand | None = None,
    constants: Mapping[str, Constant] = {},
    num_warps: int = 4,
    num_stages: int = 3,
) -> Usage:
    """Compile a template's kernel for a compute capability (80, 90, 100), as if all pointers were aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = rendering.plain(name, operands, output, constants)
    every = {**operands, **({} if output is None else {"output_ptr": output})}
    signature = {key: POINTERS[x.dtype] for key, x in every.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(every))}
    found = triton.compile(
        ASTSource(kernel, signature, constexprs={}, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    registers, spilled = resources(found.asm["cubin"])
    return Usage(registers, spilled, found.metadata.shared)


SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory that one program may take at most, in bytes."""


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread of the one kernel in a binary."""
    import triton

    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(reader), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert used is not None, said
    return int(used[1]), int(used[2])


def fits(usage: Usage, capability: int, num_warps: int) -> bool:
    """Whether a kernel runs at all there and spills nothing."""
    registers = math.ceil(usage.registers / 8) * 8 * 32 * num_warps
    return not usage.spilled and registers <= 65_536 and usage.shared <= SHARED_LIMIT[capability]
