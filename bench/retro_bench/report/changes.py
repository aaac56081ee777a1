"""Change points of a series of times, for histories over commits."""

import itertools
import math
import statistics

LEAST = 3  # least points of a level
SHIFT = 1.03  # least ratio of two levels
SIGMAS = 4.0  # least step between two levels, over the noise of their means
NOISE = 0.005  # least noise of one point
ENDS = 5  # points at either end that `drift` compares


def points(times: list[float]) -> list[int]:
    """Return the indices at which a new level begins, in order.

    >>> points([1.0, 1.01, 1.0, 1.01, 1.2, 1.21, 1.2, 1.21])
    [4]
    """
    logs = [math.log(t) for t in times]
    return sorted(_split(logs, 0, len(logs), _noise(logs)))


def drift(times: list[float]) -> float:
    """Return the ratio of the median of the last times to the median of the first: the sum of many small changes.

    >>> drift([1.0, 1.0, 1.1, 1.1])
    1.1
    """
    few = min(ENDS, max(len(times) // 2, 1))
    return round(statistics.median(times[-few:]) / statistics.median(times[:few]), 6)


def _noise(logs: list[float]) -> float:
    """Return the spread of one point, from the steps between adjacent points: few of them are changes."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return max(statistics.median(steps) / 0.954, NOISE) if steps else NOISE  # median |a - b| = 0.954 sigma


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
