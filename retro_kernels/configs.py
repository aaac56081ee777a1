"""Tile configurations as data: `configs/<op>.json`, one row a (kernel, architecture, element size, width, rows).

No autotuning: tables are tuned offline and committed, so that neither a first call waits nor a sum's order changes. To try another
tile, pass one of `candidates`; to keep it, edit the row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from ._target import Target

_TABLES = Path(__file__).with_suffix("")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a tile may depend on. width: the widest row that is multiplied, padded; rows, keys: queries and keys per neighbour."""

    kernel: str
    bytes: int  # of an element
    width: int
    rows: int
    keys: int


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys. precision: how float32 products are made ("tf32x3": three tensor-core products)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"


def choose(op: str, problem: Problem, target: Target) -> Tile:
    """The committed tile: the newest architecture not past the target's, then the narrowest row that fits.

    A pure function of its arguments and the table. Blocks are never larger than the problem (but at least 16, the smallest
    product of a tensor core).

    >>> choose("chunked_cross_attention", Problem("forward", 2, 128, 64, 128), Target(90, 232448)).block_m
    64
    """
    rows = [row for row in table(op) if row["kernel"] == problem.kernel and row["bytes"] == problem.bytes]
    known = [row["arch"] for row in rows]
    arch = max((a for a in known if a <= target.arch), default=min(known))
    fits = [row for row in rows if row["arch"] == arch and row["width"] >= problem.width and row["rows"] >= problem.rows]
    best = min(fits, key=lambda row: (row["width"], row["rows"]))
    tile = Tile(best["block_m"], best["block_n"], best["num_warps"], best["num_stages"], best["precision"])
    return _within(tile, problem)


def candidates(op: str, problem: Problem, target: Target) -> Iterator[Tile]:
    """Tiles worth measuring beside the committed one, the committed one first; some may not fit the target's shared memory."""
    chosen = choose(op, problem, target)
    yield chosen
    seen = {chosen}
    precisions = (chosen.precision,) if problem.bytes == 2 else ("tf32x3", "ieee")
    for block_m, block_n, warps, stages, precision in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4), precisions
    ):
        tile = _within(Tile(block_m, block_n, warps, stages, precision), problem)
        buffers = stages * 2 * tile.block_n * problem.width * problem.bytes + tile.block_m * problem.width * problem.bytes
        if tile not in seen and buffers <= target.shared_memory:
            seen.add(tile)
            yield tile


@functools.cache
def table(op: str) -> tuple[dict, ...]:
    """The rows of an op, as they stand in its file."""
    return tuple(json.loads((_TABLES / f"{op}.json").read_text()))


def _within(tile: Tile, problem: Problem) -> Tile:
    block_m = min(tile.block_m, max(16, 1 << (problem.rows - 1).bit_length()))
    block_n = min(tile.block_n, max(16, 1 << (problem.keys - 1).bit_length()))
    return dataclasses.replace(tile, block_m=block_m, block_n=block_n)
