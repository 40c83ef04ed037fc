"""Tile sizes and splits of `sfi::linear`. Imports nothing.

Measured on an H200 with 4 and with 16 rows, on weights from [1024, 2560] to [4096, 14336]: tiles of 64 rows of a weight
and 128 features, four in flight, are the best or near it, where all programs run at once and spread well. So the choice
is how often to split.
"""

from __future__ import annotations

import dataclasses
import math

BLOCK_M = 16
"""Rows of the input that a program holds: the fewest that tensor cores multiply."""
MOST_WEIGHTS = 3
"""Weights of one operator."""
RESIDENT = 2
"""Programs that a multiprocessor holds."""
SPREAD = 1.15
"""Programs for each multiprocessor, at least: with one each, the last to start and the slowest decide."""
DEPTH = 128
"""Features of a block."""
SHORT = 8
"""Blocks of a program that takes as long to start as to read."""


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """Sizes of `sfi::linear`."""

    rows: int
    depth: int
    """Features of the input (K)."""
    widths: tuple[int, ...]
    """Rows of each weight (N)."""

    def tiles(self, block_n: int) -> int:
        """Tiles of so many rows of one weight."""
        return sum(math.ceil(n / block_n) for n in self.widths)


@dataclasses.dataclass(frozen=True)
class LinearTile:
    """One way to compile `sfi::linear`."""

    block_n: int
    """Rows of a weight that a program works on."""
    block_k: int
    """Features that it reads at a time."""
    splits: int
    """Programs that share the features of one tile."""
    num_warps: int
    num_stages: int


def tile_for(shape: LinearShape, processors: int) -> LinearTile:
    """The tile for a GPU with so many multiprocessors, the same whether Inductor autotunes or not.

    It would time tiles on weights that its last run left in the L2 cache, which no step finds there.
    """
    block_n = 64 if shape.tiles(64) <= RESIDENT * processors else 128
    splits = splits_for(shape.tiles(block_n), math.ceil(shape.depth / DEPTH), processors)
    block_k, stages = (128, 4) if block_n == 64 else (64, 5)
    return LinearTile(block_n, block_k, splits, 4, stages)


def splits_for(tiles: int, blocks: int, processors: int) -> int:
    """Programs that share one of so many tiles, which are so many blocks long; none is without work.

    All run at once. Long programs even themselves out, and need no more splits than one for every multiprocessor, since
    what follows has to add them up. Short ones are made as many as the multiprocessors hold.
    """
    most = max(1, RESIDENT * processors // tiles)
    fewest = min(most, math.ceil(SPREAD * processors / tiles))
    splits = most if blocks <= SHORT * fewest else fewest
    return math.ceil(blocks / math.ceil(blocks / splits))
