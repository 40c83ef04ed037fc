"""What Inductor does with the operators that have a Triton template. Imports kernels and `compat.template`.

`sfi::memory_attention` becomes: one pointwise node for everything that decides about a slot (its bias), which Inductor
fuses with the computation of the mask; the template; and the merge of its splits, which fuses with what follows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sfi_compile.compat import template as inductor
from sfi_compile.kernels import dense_decode, dense_lowering, heuristics, linear_lowering, templating
from sfi_compile.kernels.heuristics import MemoryShape
from sfi_compile.site import Rejection

NEG_INF = float("-inf")
OLDEST = (8, 0)
MOST_ROWS = 1024
_PLAIN = "none: plain torch is compiled"


def supports(q: Tensor, mem_k: Tensor, mem_v: Tensor) -> Rejection | None:
    """Why `sfi::memory_attention` has no kernel for such operands; None: it has one.

    Args:
        q: [B, Hq, Q, Dk], as the other two real or fake.
        mem_k: [B, Hkv, S, Dk].
        mem_v: [B, Hkv, S, Dv].
    """
    if q.device.type != "cuda" or torch.version.hip is not None:
        found = "an AMD GPU" if q.device.type == "cuda" else f"device {q.device.type}"
        return Rejection("kernel-device", "graph", f"{found}; allowed: an NVIDIA GPU", _PLAIN)
    if templating.triton_missing():
        return Rejection("kernel-triton", "graph", "triton is not installed", "install triton")
    capability = torch.cuda.get_device_capability(q.device)
    if capability < OLDEST:
        found = f"compute capability {capability[0]}.{capability[1]}; allowed: 8.0 or later"
        return Rejection("kernel-device", "graph", found, _PLAIN)
    if q.dtype not in dense_decode.DTYPES or not q.dtype == mem_k.dtype == mem_v.dtype:
        found = f"queries, keys and values are {q.dtype}, {mem_k.dtype}, {mem_v.dtype}"
        found = f"{found}; allowed: one of bfloat16, float16, float32"
        return Rejection("kernel-dtype", "graph", found, "compute in one of those")
    widest = max(mem_k.shape[-1], mem_v.shape[-1])
    if widest > dense_decode.MAX_DIM:
        found = f"head dimension {widest}; allowed: up to {dense_decode.MAX_DIM}"
        return Rejection("kernel-width", "graph", found, _PLAIN)
    itemsize = mem_k.dtype.itemsize
    batch, query_heads, queries, key_dim = q.shape
    _, kv_heads, slots, value_dim = mem_v.shape
    shape = MemoryShape(batch, query_heads, kv_heads, queries, slots, key_dim, value_dim, itemsize)
    shared = inductor.shared_memory(q.device)
    if not heuristics.memory_tiles(shape, shared):
        found = f"{shared} bytes of shared memory, too few for {shape.rows} rows of {widest} features a KV head"
        return Rejection("kernel-device", "graph", found, _PLAIN)
    rows = shape.rows
    if rows > MOST_ROWS:
        found = f"{rows} query rows a KV head; allowed: up to {MOST_ROWS}"
        return Rejection("kernel-rows", "graph", found, "feed fewer tokens a step")
    return None


def register() -> None:
    """Register the lowerings with Inductor. Again: nothing changes."""
    inductor.register(torch.ops.sfi.memory_attention.default, lower_memory_attention)
    dense_lowering.register()
    linear_lowering.register()


@functools.cache
def _template() -> Any:
    return inductor.make_template("sfi_memory_attention", templating.source("memory_attention"))


def constants(
    shape: MemoryShape,
    tile: heuristics.Tile,
    scale: float,
    softcap: float = 0.0,
    length: bool = False,
    bias_heads: int | None = None,
    bias_queries: int = 1,
    direct: bool = False,
) -> dict[str, templating.Constant]:
    """The constants of the template.

    Args:
        shape: of the operator.
        tile: block and schedule (of which only the block is a constant).
        scale: factor of the logits.
        softcap: see the operator.
        length: there is a LENGTH.
        bias_heads: heads of BIAS (None: the KV heads).
        bias_queries: queries of BIAS.
        direct: the output is the result.
    """
    by_query_head = bias_heads not in (None, shape.kv_heads)
    return {
        "HAS_LENGTH": length,
        "BIAS_PER_ROW": by_query_head or bias_queries > 1,
        "BIAS_PER_QUERY_HEAD": by_query_head,
        "BIAS_PER_QUERY": bias_queries > 1,
        "SCALE": float(scale),
        "SOFTCAP": float(softcap),
        "DIRECT": direct,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_KEY": shape.block_key,
        "BLOCK_VALUE": shape.block_value,
        "PAD_KEY": shape.block_key != shape.key_dim,
        "PAD_VALUE": shape.block_value != shape.value_dim,
        # A quoted name: constants become source. Products in float32 are exact products, not TF32.
        "PRECISION": "'ieee'" if shape.itemsize == 4 else "'tf32'",
    }


def partial_shape(shape: MemoryShape, splits: int) -> tuple[int, ...]:
    """Shape of the template's output: [B, Hkv, splits, G * Q, Dv + more], rows of whole 16 bytes."""
    return shape.batch, shape.kv_heads, splits, shape.rows, (shape.value_dim // 4 + 1) * 4


def lower_memory_attention(
    q: Any,
    mem_k: Any,
    mem_v: Any,
    held: Any,
    mask: Any,
    scale: float,
    softcap: float = 0.0,
    sinks: Any = None,
    length: Any = None,
) -> Any:
    """The lowering of `sfi::memory_attention`; arguments as there, as IR nodes."""
    device = inductor.device_of(q)
    if device.type != "cuda":
        op = torch.ops.sfi.memory_attention.default
        return inductor.call_operator(op, q, mem_k, mem_v, held, mask, scale, softcap, sinks, length)
    batch, query_heads, queries, key_dim = inductor.shape_of(q)
    _, kv_heads, slots, value_dim = inductor.shape_of(mem_v)
    itemsize = inductor.dtype_of(mem_k).itemsize
    shape = MemoryShape(batch, query_heads, kv_heads, queries, slots, key_dim, value_dim, itemsize)
    tiles = heuristics.memory_tiles(shape, inductor.shared_memory(device))
    splits = heuristics.memory_splits(shape, tiles[0], inductor.processors(device))
    direct = splits == 1 and sinks is None
    bias = _bias(shape, held, mask)
    bias_heads, bias_queries = inductor.shape_of(bias)[1:3]
    # One for all query rows costs the template next to nothing to compute.
    place = inductor.read_inside if (bias_heads, bias_queries) == (kv_heads, 1) else inductor.realised
    bias = place(bias)
    inputs = [inductor.realised(x) for x in (q, mem_k, mem_v, bias, *(() if length is None else (length,)))]
    choices = [
        {
            **constants(shape, tile, scale, softcap, length is not None, bias_heads, bias_queries, direct),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        for tile in (tiles if inductor.tries_several() else tiles[:1])
    ]
    # Random numbers would be no lengths.
    examples = {4: lambda: torch.full((batch,), slots, dtype=torch.int64, device=device)} if length is not None else {}
    sizes = (batch, query_heads, queries, value_dim) if direct else partial_shape(shape, splits)
    output = sizes, inductor.dtype_of(q) if direct else torch.float32
    found = inductor.choose(_template(), inputs, output, (batch * kv_heads, splits, shape.tiles), choices, examples)
    return found if direct else _merge(shape, splits, found, sinks, inductor.dtype_of(q))


def _bias(shape: MemoryShape, held: Any, mask: Any) -> Any:
    """What is added to the logits, float32 [B, Hkv or Hq, 1 or Q, S]: the mask, and -inf at empty slots."""
    ops = inductor.operators()
    sizes = inductor.shape_of(mask)
    heads = max(sizes[1], shape.kv_heads)
    group = shape.query_heads // shape.kv_heads if heads > shape.kv_heads else 1
    load_held, load_mask = inductor.loader(held), inductor.loader(mask)

    def body(b: Any, h: Any, i: Any, n: Any) -> Any:
        filled = ops.ge(load_held(b, inductor.quotient(h, group), n), ops.constant(0, torch.int64))
        at = [index if size > 1 else 0 for index, size in zip((b, h, i, n), sizes, strict=True)]
        blocked = ops.constant(NEG_INF, torch.float32)
        if inductor.dtype_of(mask) == torch.bool:
            return ops.where(ops.and_(filled, load_mask(*at)), ops.constant(0.0, torch.float32), blocked)
        return ops.where(filled, ops.to_dtype(load_mask(*at), torch.float32), blocked)

    shaped = (shape.batch, heads, sizes[2], shape.slots)
    return inductor.pointwise(shaped, torch.float32, inductor.device_of(held), body)


def _merge(shape: MemoryShape, splits: int, partial: Any, sinks: Any, dtype: torch.dtype) -> Any:
    """[B, Hq, Q, Dv] from the splits' results, weighted by their sums of exponentials; sinks add to the sum.

    Computed as the template's output lies, [B, Hkv, G * Q, Dv], which is the same in memory: indices with quotients
    take Inductor long to analyse.
    """
    ops = inductor.operators()
    load = inductor.loader(partial)
    group = shape.query_heads // shape.kv_heads
    load_sinks = None if sinks is None else inductor.loader(sinks)
    sink_sizes = () if sinks is None else inductor.shape_of(sinks)

    def body(b: Any, kv_head: Any, row: Any, d: Any) -> Any:
        zero = ops.constant(0.0, torch.float32)
        logs = [load(b, kv_head, s, row, shape.value_dim) for s in range(splits)]
        columns = []
        if load_sinks is not None:
            head, i = kv_head * group + inductor.quotient(row, shape.queries), inductor.remainder(row, shape.queries)
            at = [index if size > 1 else 0 for index, size in zip((b, head, i), sink_sizes[:3], strict=True)]
            columns = [ops.to_dtype(load_sinks(*at, c), torch.float32) for c in range(sink_sizes[3])]
        top = functools.reduce(ops.maximum, [*logs, *columns])
        pivot = ops.where(ops.eq(top, ops.constant(NEG_INF, torch.float32)), zero, top)
        weights = [ops.exp(ops.sub(x, pivot)) for x in (*logs, *columns)]
        total = functools.reduce(ops.add, weights)
        total = ops.where(ops.eq(total, zero), ops.constant(1.0, torch.float32), total)
        parts = [ops.mul(weights[s], load(b, kv_head, s, row, d)) for s in range(splits)]
        return ops.to_dtype(ops.truediv(functools.reduce(ops.add, parts), total), dtype)

    sizes = (shape.batch, shape.kv_heads, shape.rows, shape.value_dim)
    merged = inductor.pointwise(sizes, dtype, inductor.device_of(partial), body)
    return inductor.viewed(merged, (shape.batch, shape.query_heads, shape.queries, shape.value_dim))
