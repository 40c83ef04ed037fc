"""Compiling a module in place for some of its calls. Checked on torch 2.11.0, 2.13.0 and 2.14.1.

`Module.compile` has two drawbacks here. It compiles every call. And Dynamo counts recompilations by code object, which
is one for all modules of a class, so that several compiled models together exhaust one limit.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def compile_calls(module: nn.Module, chosen: Callable[[tuple[Any, ...], Mapping[str, Any]], bool], **how: Any) -> None:
    """Compile those calls of a module whose arguments are `chosen`; all others run as they are.

    Like `Module.compile`, which this replaces and which replaces this: a copy of the module is not compiled.

    Args:
        module: compiled in place.
        chosen: (positional arguments, keyword arguments) → whether to compile the call.
        **how: arguments of `torch.compile`.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)

    # A code object of its own is a recompilation limit of its own. Its graphs die with it.
    call.__code__ = call.__code__.replace(co_name=type(module).__name__)
    compiled = torch.compile(types.MethodType(call, module), **how)
    uncompiled = module._call_impl

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (compiled if chosen(args, kwargs) else uncompiled)(*args, **kwargs)

    module._compiled_call_impl = choose
