"""Tables of tiles as data: `ops/<op>/tiles.json`, one row for each (kernel, architecture, element size, width, rows).

There is no autotuning. Tables are tuned offline (`retro-bench tune`) and committed, so a first call does not wait
and the order of sums never changes. `replaced` tries other rows; `watched` lists the rows that were chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

from ..core import layouts
from .target import Target

_OPS = Path(__file__).resolve().parent.parent / "ops"
_watching: list[list[tuple[str, dict]]] = []
_replaced: dict[str, tuple[dict, ...]] = {}


@dataclasses.dataclass(frozen=True)
class TileQuery:
    """Sizes and type that choose a tile. width: widest row of a product; rows, keys: queries and keys a neighbour."""

    kernel: str
    bytes: int  # size of one element
    width: int
    rows: int
    keys: int
    options: tuple[str, ...] = ()  # options of the call that cost registers; a row's "with" names some of them


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys. precision: of float32 products ("tf32x3": three tensor-core products).
    max_registers: limit for a thread, or None; with a lower limit a multiprocessor holds more blocks.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    max_registers: int | None = None


def choose_tile(op: str, query: TileQuery, target: Target) -> Tile:
    """Return the committed tile for a call, from the most specific row of the op's table.

    The rows of one architecture are compared: the newest that is not newer than the target. A row fits calls up to its
    width and its number of queries. A row with "with": "dropout+masked" fits only calls that have both options. The row
    with the smallest width is chosen; of several, the one with the most options; of these, the one with the fewest
    queries. Its blocks are cut to the sizes of the call, but never below 16, the smallest product of a tensor core.

    >>> choose_tile("chunked_cross_attention", TileQuery("forward", 2, 128, 64, 128), Target(90, 232448)).block_m
    64
    """
    rows = _replaced.get(op)
    row, tile = _choice(query, target, rows) if rows is not None else _committed_choice(op, query, target)
    served(op, row)
    return tile


@functools.lru_cache(maxsize=4096)
def _committed_choice(op: str, query: TileQuery, target: Target) -> tuple[dict, Tile]:
    """Cache the choice, because reading the table takes longer than launching a kernel."""
    return _choice(query, target, _committed(op))


def _choice(query: TileQuery, target: Target, rows: tuple[dict, ...]) -> tuple[dict, Tile]:
    """Return the row that is chosen for a query, and its tile, no larger than the sizes of the query."""
    ours = newest(rows, query.kernel, query.bytes, target)
    fits = [row for row in ours if row["width"] >= query.width and row["rows"] >= query.rows]
    fits = [row for row in fits if set(named(row)) <= set(query.options)]
    best = min(fits, key=lambda row: (row["width"], -len(named(row)), row["rows"]))
    block_m = min(best["block_m"], max(16, 1 << (query.rows - 1).bit_length()))
    block_n = min(best["block_n"], max(16, 1 << (query.keys - 1).bit_length()))
    others = (best[name] for name in ("num_warps", "num_stages", "precision"))
    limit = best.get("max_registers") if target.backend == "cuda" else None  # AMD's compiler has no such option
    return best, Tile(block_m, block_n, *others, limit)


def newest(rows: tuple[dict, ...], kernel: str, bytes: int, target: Target) -> list[dict]:
    """Return a kernel's rows of the architecture that is `nearest` to the target."""
    ours = [row for row in rows if row["kernel"] == kernel and row["bytes"] == bytes]
    arch = target.nearest([row["arch"] for row in ours])
    return [row for row in ours if row["arch"] == arch]


def named(row: dict) -> list[str]:
    """Return the options that a call must have for the row to serve it."""
    return row["with"].split("+") if "with" in row else []


def served(op: str, row: dict) -> dict:
    """Return the row, and add it to the lists of `watched`."""
    for seen in _watching:
        if (op, row) not in seen:
            seen.append((op, row))
    return row


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, dict]]]:
    """Yield a list that collects the distinct (op, row) pairs of the calls made inside. Not thread-safe."""
    seen: list[tuple[str, dict]] = []
    _watching.append(seen)
    layouts.forget()
    try:
        yield seen
    finally:
        _watching.pop()


@contextlib.contextmanager
def replaced(op: str, rows: tuple[dict, ...]) -> Iterator[None]:
    """Inside, `rows` are the op's table. Not thread-safe."""
    before = _replaced.get(op)
    _replaced[op] = rows
    layouts.forget()
    try:
        yield
    finally:
        _replaced.pop(op)
        if before is not None:
            _replaced[op] = before
        layouts.forget()


def table(op: str) -> tuple[dict, ...]:
    """Return the rows of an op, from `replaced` or from its file."""
    return _replaced.get(op) or _committed(op)


def write_row(op: str, old: dict, new: dict) -> None:
    """Replace a row of the op's file and leave all other lines unchanged.

    Raises ValueError unless the file has exactly one such row.
    """
    path = _OPS / op / "tiles.json"
    lines = path.read_text().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith("{") and json.loads(line.rstrip().rstrip(",")) == old]
    if len(at) != 1:
        raise ValueError(f"{op}/{path.name}: expected one row {old}; got {len(at)}")
    lines[at[0]] = lines[at[0]].replace(json.dumps(old), json.dumps(new))
    path.write_text("".join(lines))
    reread()


def reread() -> None:
    """Read the files again, after a change."""
    _committed.cache_clear()
    _committed_choice.cache_clear()
    layouts.forget()


@functools.cache
def _committed(op: str) -> tuple[dict, ...]:
    return tuple(json.loads((_OPS / op / "tiles.json").read_text()))
