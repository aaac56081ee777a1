"""Statistics of raw samples: the numbers of a record, and the estimate that ratios use. Needs no torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

SLOW_CALL_S = 0.4  # a call this long, a reference or a slow baseline, is sampled once by default


@dataclass(frozen=True)
class Effort:
    """Samples of a contender: at least `least` (one of a call beyond `slow_s`), at most `most`, for about `seconds`."""

    least: int = 3
    most: int = 50
    seconds: float = 0.4
    slow_s: float = SLOW_CALL_S


def summary(samples: list[float], method: dict[str, Any]) -> dict[str, Any]:
    """Return samples in seconds with their minimum, median, p10 and p90."""
    ordered = sorted(samples)
    return {
        "samples": samples,
        "minimum": ordered[0],
        "median": statistics.median(ordered),
        "p10": quantile(ordered, 0.1),
        "p90": quantile(ordered, 0.9),
        "method": method,
    }


def quantile(ordered: list[float], share: float) -> float:
    """Linear interpolation between the order statistics of a sorted list."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def estimate(record_time: dict[str, Any]) -> float:
    """Return the number of a `time` record that ratios use: the minimum on CPUs, the median on GPUs."""
    return record_time["minimum"] if record_time["method"]["clock"] == "wall" else record_time["median"]
