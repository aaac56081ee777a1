"""Change points of a series of times, for histories over commits."""

from __future__ import annotations

import itertools
import math
import statistics

LEAST = 3  # points of a level
SHIFT = 1.03  # a smaller step is none
SIGMAS = 4.0  # of the noise of two levels' means
NOISE = 0.005  # of one point, at least
ENDS = 5  # points at either end that `drift` compares


def points(times: list[float]) -> list[int]:
    """Return the indices at which another level begins, in order.

    >>> points([1.0, 1.01, 1.0, 1.01, 1.2, 1.21, 1.2, 1.21])
    [4]
    """
    logs = [math.log(t) for t in times]
    return sorted(_split(logs, 0, len(logs), _noise(logs)))


def drift(times: list[float]) -> float:
    """Return the last times over the first ones, by their medians: the sum of many small steps.

    >>> drift([1.0, 1.0, 1.1, 1.1])
    1.1
    """
    few = min(ENDS, max(len(times) // 2, 1))
    return round(statistics.median(times[-few:]) / statistics.median(times[:few]), 6)


def _noise(logs: list[float]) -> float:
    """Spread of one point, from the steps between neighbours: few of them are changes."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return max(statistics.median(steps) / 0.954, NOISE) if steps else NOISE  # |difference of two|: 0.954 sigma


def _split(logs: list[float], first: int, last: int, noise: float) -> list[int]:
    best, where = 0.0, None
    for at in range(first + LEAST, last - LEAST + 1):
        step = abs(statistics.fmean(logs[at:last]) - statistics.fmean(logs[first:at]))
        sure = step / (noise * math.sqrt(1 / (at - first) + 1 / (last - at)))
        if step > math.log(SHIFT) and sure > max(best, SIGMAS):
            best, where = sure, at
    if where is None:
        return []
    return [where, *_split(logs, first, where, noise), *_split(logs, where, last, noise)]
