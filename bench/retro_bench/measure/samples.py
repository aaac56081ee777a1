"""Statistics of raw samples: the numbers of a record, and the estimate that ratios use. Needs no torch."""

from dataclasses import dataclass
from typing import Any

import numpy


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
    p10, median, p90 = map(float, numpy.quantile(samples, (0.1, 0.5, 0.9)))
    return {"samples": samples, "minimum": min(samples), "median": median, "p10": p10, "p90": p90, "method": method}


def estimate(record_time: dict[str, Any]) -> float:
    """Return the number of a `time` record that ratios use: the minimum on CPUs, the median on GPUs."""
    return record_time["minimum"] if record_time["method"]["clock"] == "wall" else record_time["median"]
