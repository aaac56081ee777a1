"""Errors of the estimate against published times."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...machines import MACHINES
from ..model import EVENTS, Estimate, estimate
from . import kernels
from .published import ROWS, PublishedTime

#: nine tenths of the rows are nearer to their published times (16.1% is the 90th percentile)
SPREAD = 0.18
SEED = 20261123  # draws the third of each kernel's rows that the fit did not see
#: tiles of flash attention (queries, keys, warps, stages); the one with the least estimate counts
TILES = ((128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 32, 4, 3), (128, 64, 4, 3))


class Judged(NamedTuple):
    """A published row and its estimate. ratio: estimated over measured."""

    row: PublishedTime
    ratio: float
    held_back: bool
    bound: str


def held_back() -> set[int]:
    """Return the indices of `ROWS` that no constant was fitted to: a third of each kernel's."""
    of_kernel = defaultdict(list)
    for at, row in enumerate(ROWS):
        of_kernel[row.kernel].append(at)
    draw = random.Random(SEED)
    return {at for rows in of_kernel.values() for at in draw.sample(rows, len(rows) // 3)}


def estimated(row: PublishedTime) -> Estimate:
    """Estimate a row's launch."""
    machine = MACHINES[row.machine]
    make = getattr(kernels, row.kernel)
    options = [{"tile": tile} for tile in TILES] if row.kernel == "flash" else [row.options]
    launches = [make(row.dtype, *row.sizes, **one) for one in options]
    found = [estimate(launch, machine) for launch in launches]
    return min(found, key=lambda one: one.seconds)


def judged(estimated: Callable[[PublishedTime], Estimate] = estimated) -> Iterator[Judged]:
    """Yield every published row with its estimate."""
    held = held_back()
    for at, row in enumerate(ROWS):
        found = estimated(row)
        seconds = found.seconds + (EVENTS if row.how == "events" else 0.0)
        yield Judged(row, 1e6 * seconds / row.microseconds, at in held, found.bound)


class Chosen(NamedTuple):
    """The tile that the estimate holds for the fastest of those published for a size.

    slower: its measured time over the fastest tile's. ratios: estimated over measured time, of every tile.
    """

    tile: tuple[int, ...]
    slower: float
    ratios: list[float]


def chosen(sizes: tuple[int, ...], measured: dict[tuple[int, ...], float]) -> Chosen:
    """The estimate's choice for a size of `TILED`."""
    machine, times = MACHINES["H100"], {}
    for tile in measured:
        launch = kernels.product("float16", *sizes, tile=tile, turned=True)
        found = estimate(launch, machine)
        times[tile] = 1e6 * (found.seconds + EVENTS)
    best = min(times, key=times.get)
    ratios = [times[tile] / us for tile, us in measured.items()]
    return Chosen(best, measured[best] / min(measured.values()), ratios)


def errors(ratios: Iterable[float]) -> tuple[float, float]:
    """(median, 90th percentile) of |ratio - 1|."""
    apart = sorted(abs(ratio - 1) for ratio in ratios)
    return statistics.median(apart), apart[min(len(apart) - 1, int(0.9 * len(apart)))]
