"""Launches of Triton kernels without a GPU: recorded on meta tensors, and compiled for a GPU that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.kernels.triton_tools import POINTERS, Usage, resources

OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclasses.dataclass
class Launch:
    """One launch of a kernel: what `kernel[grid](*args, **kwargs)` was given."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def usage(self, capability: int) -> Usage:
        """Compile it for a compute capability."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: value for name, value in self.kwargs.items() if name in OPTIONS and value is not None}
        names = self.kernel.arg_names
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        plain = {p.name for p in self.kernel.params if p.do_not_specialize}
        signature: dict[str, Any] = {}
        constants, attributes = {}, {}
        for i, name in enumerate(names):
            value = given[name]
            if name in constant or (value == 1 if type(value) is int and name not in plain else False):
                signature[name], constants[(i,)] = "constexpr", value
                continue
            if isinstance(value, tuple):
                signature[name] = tuple(POINTERS[x.dtype] for x in value)
                continue
            pointer = isinstance(value, torch.Tensor)
            signature[name] = POINTERS[value.dtype] if pointer else "i32" if type(value) is int else "fp32"
            if pointer or (type(value) is int and value % 16 == 0 and name not in plain):
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return Usage(*resources(found.asm["cubin"]), found.metadata.shared)


@contextlib.contextmanager
def recorded(module: Any, *names: str) -> Iterator[list[Launch]]:
    """Launches of a module's kernels are recorded, and nothing runs."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launches.append(Launch(self.kernel, grid, args, kwargs))

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name))))
        yield launches
