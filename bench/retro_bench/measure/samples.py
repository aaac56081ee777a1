"""Statistics of raw samples: the numbers of a record, and the estimate that ratios use. Needs no torch."""

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Effort:
    """Bounds on the samples of a contender: their number, and seconds.

    A call that takes `slow_s` is sampled once after its warm-up. If the first call takes `once_s`, then it is the only
    sample, because another call would use the time of other contenders and cases.
    """

    least: int = 3
    most: int = 50
    seconds: float = 0.4
    slow_s: float = 0.4
    once_s: float = 1.0


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
    """Interpolate linearly between the order statistics of a sorted list."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def estimate(record_time: dict[str, Any]) -> float:
    """Return the number of a `time` record that ratios use: the minimum on CPUs, the median on GPUs."""
    return record_time["minimum"] if record_time["method"]["clock"] == "wall" else record_time["median"]
