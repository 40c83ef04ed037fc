"""Inductor's private entry points. Checked on torch 2.11.0, 2.13.0 and 2.14.1."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

COMBINED = {"combo_kernels": True}
"""Inductor config by which kernels that do not depend on each other become one: in a decode step, norms and rotations
of queries and of keys, and what is written, each of which is over before it is launched."""


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], tag: str = ""
) -> Callable[..., Any]:
    """Compile an FX graph as `backend="inductor"` would, with Inductor config `patches`.

    Inductor keeps compiled graphs on disk, by what is in them. `tag` stands for what it cannot see: a graph that was
    kept under another tag is compiled anew.
    """
    from torch._inductor.compile_fx import compile_fx

    settings = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}{tag}"):  # type: ignore[attr-defined]
        compiled = compile_fx(gm, list(inputs), config_patches=patches or None)
    if not callable(compiled):
        raise TypeError(f"Inductor returned {type(compiled).__name__}, not a callable")
    return compiled


def mode_patches(mode: str | None) -> dict[str, Any]:
    """Inductor config that `torch.compile(mode=...)` stands for.

    Raises:
        ValueError: `mode` is not one of Inductor's, with the names allowed.
    """
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    allowed = list_mode_options()
    if mode not in allowed:
        raise ValueError(f"sfi: option 'mode' is {mode!r}; allowed: {', '.join(map(repr, allowed))}")
    return dict(list_mode_options(mode))


@contextmanager
def without_collector() -> Iterator[None]:
    """Run without the cycle collector, which goes through all of a compiler's objects again and again: for dozens of
    layers, a seventh of Inductor's time. What it would have freed stays until it runs the next time."""
    enabled = gc.isenabled()
    gc.collect()  # such as a model on a GPU that has just been dropped
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Run with an empty Inductor cache (kernels and graphs), so that a compile time is a compile time."""
    from torch._inductor.utils import fresh_cache as fresh

    with fresh():
        yield
