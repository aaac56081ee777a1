"""Times that others measured, and the errors of the estimate against them. The text files name the sources."""

from __future__ import annotations

import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...machines import MACHINES
from ..model import EVENTS, estimate
from . import kernels

#: nine tenths of the rows are nearer to their published times (16.1% is the 90th percentile)
SPREAD = 0.18
SEED = 20261123  # draws the third of each kernel's rows that the fit did not see
#: tiles of flash attention (queries, keys, warps, stages); the one with the least estimate counts
FLASH_TILES = ((128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 32, 4, 3), (128, 64, 4, 3))


class PublishedTime(NamedTuple):
    """One published time."""

    kernel: str  # a function of `kernels`
    machine: str
    dtype: str
    sizes: tuple[int, ...]  # the function's arguments after the type
    microseconds: float
    how: str  # "ncu" is the kernel alone, "events" includes the overhead of events

    def __str__(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.sizes))} {self.dtype}, {self.machine}: {self.microseconds:g} us"


def _rows(name: str) -> Iterator[PublishedTime]:
    lines = Path(__file__).with_name(name).read_text().replace("\n    ", " ").splitlines()
    for line in [line for line in lines if not line.startswith("#")]:
        what, _, times = line.partition(": ")
        kernel, machine, how, dtype, _source = what.split()
        for time in times.split(", "):
            sizes, microseconds = time.split()
            numbers = tuple(map(int, re.split("[x/]", sizes)))
            yield PublishedTime(kernel, machine, dtype, numbers, float(microseconds), how)


ROWS = list(_rows("times.txt"))
#: products whose tile was published too: M, N, K and the tile are the sizes
TILES = list(_rows("tiles.txt"))


class Judged(NamedTuple):
    """A published row and its estimate. ratio: estimated over measured."""

    row: PublishedTime
    ratio: float
    bound: str


def held_back() -> set[int]:
    """Return the indices of `ROWS` that no constant was fitted to: a third of each kernel's."""
    of_kernel = defaultdict(list)
    for at, row in enumerate(ROWS):
        of_kernel[row.kernel].append(at)
    draw = random.Random(SEED)
    return {at for rows in of_kernel.values() for at in draw.sample(rows, len(rows) // 3)}


def judged(rows: Iterable[PublishedTime]) -> Iterator[Judged]:
    """Yield published rows with their estimates."""
    for row in rows:
        make = getattr(kernels, row.kernel)
        tiles = FLASH_TILES if row.kernel == "flash" else ((),)
        launches = [make(row.dtype, *row.sizes, *tile) for tile in tiles]
        found = min((estimate(launch, MACHINES[row.machine]) for launch in launches), key=lambda one: one.seconds)
        seconds = found.seconds + (EVENTS if row.how == "events" else 0.0)
        yield Judged(row, 1e6 * seconds / row.microseconds, found.bound)


def fastest(rows: list[Judged]) -> tuple[Judged, float]:
    """Return the row with the least estimated time, and its measured time over the least measured time."""
    best = min(rows, key=lambda one: one.ratio * one.row.microseconds)
    return best, best.row.microseconds / min(one.row.microseconds for one in rows)


def errors(ratios: Iterable[float]) -> tuple[float, float]:
    """(median, 90th percentile) of |ratio - 1|."""
    apart = sorted(abs(ratio - 1) for ratio in ratios)
    return statistics.median(apart), apart[min(len(apart) - 1, int(0.9 * len(apart)))]
