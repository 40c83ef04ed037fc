"""Inductor's Triton templates and the IR around them. Checked on torch 2.11.0 and 2.13.0, read in 2.14.1.

A lowering gets IR nodes, realises what a template reads, offers a few choices, and computes the rest pointwise, so that
Inductor fuses it with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Node = Any
"""A value in Inductor's IR."""


def register(op: Any, lowering: Callable[..., Node]) -> None:
    """Make `lowering` what Inductor does with the operator `op`. Registering again replaces it."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lowering)


def call_operator(op: Any, *args: Any) -> Node:
    """Leave an operator to its own kernel: what Inductor does with one that has no lowering."""
    from torch._inductor import lowering

    handler: Any = lowering.fallback_handler
    return handler(op, add_to_fallback_set=False)(*args)


def make_template(name: str, source: str) -> Any:
    """A Triton template; its grid is what `choose` is given. One process has one of a name."""
    from torch._inductor.select_algorithm import TritonTemplate

    known = TritonTemplate.all_templates.get(name)
    return known if known is not None else TritonTemplate(name=name, grid=_grid, source=source)


def _grid(x: int, y: int, z: int, meta: dict[str, Any]) -> tuple[int, int, int]:
    return x, y, z


def shape_of(x: Node) -> tuple[int, ...]:
    """Sizes of a node, as numbers; a symbolic size becomes one, with a guard."""
    from torch._inductor.virtualized import V

    return tuple(V.graph.sizevars.guard_int(size) for size in x.get_size())


def dtype_of(x: Node) -> torch.dtype:
    """The dtype of a node."""
    found: torch.dtype = x.get_dtype()
    return found


def device_of(x: Node) -> torch.device:
    """The device of a node."""
    found: torch.device = x.get_device()
    return found


def realised(x: Node) -> Node:
    """The node as a buffer, or as a view of one."""
    from torch._inductor import ir

    return ir.ExternKernel.realize_input(x)


def read_inside(x: Node) -> Node:
    """Realise a pointwise node, and let the template that reads it compute it instead, unless that takes a look-up.

    Left to itself, Inductor fuses what comes before a template only where that reads no more bytes than it writes.
    """
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    found = realised(x)
    buffer = V.graph.get_buffer(found.get_name())
    if all(isinstance(read, MemoryDep) and not read.is_indirect() for read in buffer.get_read_writes().reads):
        V.graph.invoke_quant_ops.add(buffer.get_operation_name())
    return found


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(device: torch.device) -> int:
    """Shared memory that a program on a GPU may have, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def tries_several() -> bool:
    """Whether Inductor is to time several choices (`mode="max-autotune"` and its kin)."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def choose(
    template: Any,
    inputs: Sequence[Node],
    output: tuple[Sequence[int], torch.dtype],
    grid: tuple[int, int, int],
    choices: Sequence[dict[str, Any]],
    examples: dict[int, Callable[[], torch.Tensor]],
) -> Node:
    """The template's output by the best of some choices; the only one, or timed.

    Args:
        template: of `make_template`.
        inputs: realised nodes, in the order of the template's `def_kernel`.
        output: shape and dtype; contiguous.
        grid: programs along each axis.
        choices: `num_warps`, `num_stages` and constants of each.
        examples: tensors to time with, by input; others are random.
    """
    from torch._inductor import ir, select_algorithm

    shape, dtype = output
    sizes = list(shape)
    layout = ir.FixedLayout(inputs[0].get_device(), dtype, sizes, ir.FlexibleLayout.contiguous_strides(sizes))
    callers: list[Any] = []
    for choice in choices:
        error = template.maybe_append_choice(
            callers, input_nodes=tuple(inputs), layout=layout, call_sizes=list(grid), **choice
        )
        if error is not None:
            raise error
    # With generators, Inductor decides here and not after fusion: it could not time fused choices with them.
    generators = {i: (lambda _, make=make: make()) for i, make in examples.items()}
    select: Any = select_algorithm.autotune_select_algorithm
    found = select(template.name, callers, list(inputs), layout, input_gen_fns=generators)
    # A node in torch 2.11, a pair with the choice since 2.12.
    return found[0] if isinstance(found, tuple) else found


def strides_of(x: Node) -> tuple[int, ...]:
    """Strides of a realised node, as numbers."""
    from torch._inductor.virtualized import V

    return tuple(V.graph.sizevars.guard_int(stride) for stride in x.get_stride())


def expanded(x: Node, shape: Sequence[int]) -> Node:
    """`x.expand(shape)`, of the realised node: nothing as large as the shape is written."""
    from torch._inductor.lowering import lowerings

    x.realize()
    return lowerings[torch.ops.aten.expand.default](x, list(shape))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Node:
    """A contiguous buffer, for a template to write beside its output."""
    from torch._inductor.lowering import empty_strided

    found: Any = empty_strided(list(shape), None, dtype=dtype, device=device)
    found.realize()
    return found


def launch(
    template: Any,
    inputs: Sequence[Node],
    written: Sequence[Node],
    output: tuple[Sequence[int], torch.dtype],
    grid: tuple[int, int, int],
    choice: dict[str, Any],
) -> Node:
    """The template's output, by the one choice given, in every mode. Others than `choose` may write inputs too.

    Args:
        template: of `make_template`.
        inputs: realised nodes, in the order of the template's `def_kernel`.
        written: those that the template writes, of `empty`.
        output: shape and dtype; contiguous.
        grid: programs along each axis.
        choice: `num_warps`, `num_stages` and constants.
    """
    from torch._inductor import ir

    shape, dtype = output
    sizes = list(shape)
    layout = ir.FixedLayout(inputs[0].get_device(), dtype, sizes, ir.FlexibleLayout.contiguous_strides(sizes))
    callers: list[Any] = []
    error = template.maybe_append_choice(
        callers,
        input_nodes=tuple(inputs),
        layout=layout,
        call_sizes=list(grid),
        mutated_inputs=list(written),
        **choice,
    )
    if error is not None:
        raise error
    return callers[0].output_node()


def pointwise(shape: Sequence[Any], dtype: torch.dtype, device: torch.device, body: Callable[..., Any]) -> Node:
    """A node computed element by element: `body(*indices)` in terms of `operators()` and `loader`."""
    from torch._inductor import ir

    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=lambda index: body(*index), ranges=list(shape))


def loader(x: Node) -> Callable[..., Any]:
    """Reads one element of a node, by its indices, inside `pointwise`."""
    load = x.make_loader()
    return lambda *index: load(list(index))


def viewed(x: Node, shape: Sequence[int]) -> Node:
    """A node in another shape of as many elements."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.view.default](x, list(shape))


def operators() -> Any:
    """The operators of `pointwise`: `add`, `exp`, `where`, `constant(value, dtype)` and so on."""
    from torch._inductor.virtualized import ops

    return ops


def quotient(index: Any, by: int) -> Any:
    """`index // by` of an index expression."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(index, by)


def remainder(index: Any, by: int) -> Any:
    """`index % by` of an index expression that is not negative."""
    from torch.utils._sympy.functions import ModularIndexing

    return ModularIndexing(index, 1, by)
