"""How an `sfi::` operator is registered: schema from the signature, one body for all devices. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Body = TypeVar("Body", bound=Callable[..., Any])


def operator(*written: str, reads_flags: bool = False) -> Callable[[Body], Body]:
    """Register a function as `sfi::` operator of its name, for all devices.

    Without `torch.library.custom_op`'s wrappers, which take longer than the small operators of a step themselves.

    Args:
        written: the arguments that it changes in place.
        reads_flags: it reads flags on the host, and must stay outside CUDA graphs.
    """
    tags = (torch.Tag.cudagraph_unsafe,) if reads_flags else ()

    def register(body: Body) -> Body:
        name = f"sfi::{body.__name__}"
        torch.library.define(name, torch.library.infer_schema(body, mutates_args=written), tags=tags)
        torch.library.impl(name, "default", body)
        return body

    return register


def fake_of(body: Callable[..., Any]) -> Callable[[Body], Body]:
    """Register a function as what the operator `body` does to shapes and dtypes."""

    def register(fake: Body) -> Body:
        torch.library.register_fake(f"sfi::{body.__name__}", fake)
        return fake

    return register


def only_writes(*_: Any) -> None:
    """The fake of an operator that returns nothing."""
