"""Tile sizes and splits of the Triton kernels. Imports nothing.

Measured on an H200: a program of decode attention is bound by what its warps wait for in every block, not by how many
blocks are in flight. So a block is as large as fits: with 64 KiB of keys and values, one program on each multiprocessor
reads at full bandwidth, and needs no merge where there are enough rows.
"""

from __future__ import annotations

import dataclasses
import math

BLOCK_BYTES = 65_536, 32_768, 16_384, 8_192
"""Keys and values of one block: two blocks are in flight while a third is used."""
PROGRAM_BYTES = 131_072
"""What a multiprocessor could read while a program starts and ends (4 µs of 33 GB/s on an H200)."""
MERGE_BYTES = 65_536
"""The same for the merge of splits, a kernel of its own."""
MAX_SPLITS = 32
"""The merge of the splits is unrolled."""


@dataclasses.dataclass(frozen=True)
class MemoryShape:
    """Sizes of `sfi::memory_attention`."""

    batch: int
    query_heads: int
    kv_heads: int
    queries: int
    slots: int
    key_dim: int
    value_dim: int
    itemsize: int
    """Bytes of an element of keys and values."""

    @property
    def rows(self) -> int:
        """Query rows of one KV head: its query heads times the queries."""
        return self.query_heads // self.kv_heads * self.queries

    @property
    def block_m(self) -> int:
        """Query rows of one program: 16 at least, for its products, and no more than registers hold the output of."""
        most = 16 if self.itemsize == 4 else min(64, 8192 // self.block_value)
        return min(max(16, power_of_two(self.rows)), most)

    @property
    def tiles(self) -> int:
        """Programs that share the query rows of one KV head."""
        return math.ceil(self.rows / self.block_m)

    @property
    def block_key(self) -> int:
        """Key features of one program."""
        return max(16, power_of_two(self.key_dim))

    @property
    def block_value(self) -> int:
        """Value features of one program."""
        return max(16, power_of_two(self.value_dim))

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one slot's key and value."""
        return (self.block_key + self.block_value) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Tile:
    """One way to compile a kernel."""

    block_n: int
    """Slots that a program reads at a time."""
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """Places in a row of what a slow step leaves for each position: a multiple of 16, so that rows begin where vectors
    may. What lies past the positions may be anything."""
    return -(-size // 16) * 16


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def memory_tiles(shape: MemoryShape, shared: int) -> tuple[Tile, ...]:
    """Tiles worth trying for `sfi::memory_attention`, the best one first; none if nothing fits.

    Args:
        shape: of the operator.
        shared: bytes of shared memory that a program may have.
    """
    tiles = []
    for block_bytes in BLOCK_BYTES if shape.block_m == 16 else BLOCK_BYTES[1:]:
        block = min(128, max(16, power_of_two(block_bytes // shape.slot_bytes + 1) // 2))
        # More than these would not fit into registers.
        most = 128 if shape.itemsize == 2 else 32
        tile = Tile(min(most, block), 4, 3)
        if _shared_bytes(shape, tile) <= shared:
            tiles.append(tile)
    return tuple(dict.fromkeys(tiles))[:2]


def _shared_bytes(shape: MemoryShape, tile: Tile) -> int:
    """Shared memory of a program, at most: blocks in flight, queries, biases, and what products pass through."""
    rest = 20_480 if shape.itemsize == 4 else 4_096
    in_flight = (tile.num_stages - 1) * tile.block_n
    rows = shape.block_m * (shape.block_key * shape.itemsize + 12 * tile.block_n)
    return in_flight * shape.slot_bytes + rows + rest


def memory_splits(shape: MemoryShape, tile: Tile, processors: int) -> int:
    """Programs that share the slots of one row and KV head.

    As many as keep all multiprocessors busy, and no more: every program takes its time to start and to end, and splits
    have to be merged.

    Args:
        shape: of the operator.
        tile: the one that will run.
        processors: multiprocessors of the GPU.
    """
    programs = shape.batch * shape.kv_heads * shape.tiles
    resident = max(1, min(4, BLOCK_BYTES[0] // (tile.block_n * shape.slot_bytes)))

    def cost(splits: int) -> int:
        waves = math.ceil(programs * splits / (processors * resident))
        return waves * (PROGRAM_BYTES + resident * math.ceil(shape.slots / splits) * shape.slot_bytes)

    most = min(MAX_SPLITS, max(1, shape.slots // tile.block_n))
    best = min(range(1, most + 1), key=cost)
    return best if cost(best) + MERGE_BYTES < cost(1) else 1
