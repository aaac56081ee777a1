"""Errors of the estimate against published times."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
    options = [{"tile": tile} for tile in TILES] if row.kernel == "flash" else [{}]
    launches = [make(row.dtype, *row.sizes, **one) for one in options]
    found = [estimate(launch, machine) for launch in launches]
    return min(found, key=lambda one: one.seconds)


def judged(rows: Iterable[PublishedTime]) -> Iterator[Judged]:
    """Yield published rows with their estimates."""
    for row in rows:
        found = estimated(row)
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
