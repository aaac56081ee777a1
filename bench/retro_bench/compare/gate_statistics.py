"""Statistics of `ab`: ratio of medians, cluster bootstrap over pairs of processes, and the verdict.

A process has one memory layout, page placement and clock state, so samples within a pair are not independent. The
bootstrap therefore resamples pairs. On a shared machine a comparison of pooled means raises many false alarms.
"""

import math
import random
import statistics
from dataclasses import dataclass

RESAMPLES = 2000
CONFIDENCE = 0.95
WARN, FAIL, CONTROL = 1.03, 1.05, 1.02
SETTLED = 1.05  # greatest high over low; a wider interval could hide a regression

#: samples of one worker pair: times of the base and times of the head, taken in ABBA order
Pair = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Ratio:
    """Time of the head over the base's, with the bootstrap interval from `low` to `high`; 0 to infinity: unknown."""

    value: float
    low: float
    high: float


def pair_ratio(pair: Pair) -> float:
    """Return the median ratio of adjacent samples, which met the same state of the machine."""
    base, head = pair
    return statistics.median(b / a for a, b in zip(base, head, strict=True))


def ratio(pairs: list[Pair]) -> Ratio:
    """Return the median of the pairs' ratios. Its interval comes from resampling whole pairs; one pair has none."""
    centres = [math.log(pair_ratio(pair)) for pair in pairs]
    if len(centres) == 1:
        return Ratio(math.exp(centres[0]), 0.0, math.inf)
    rng = random.Random(0)
    resampled = sorted(statistics.median(rng.choices(centres, k=len(centres))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = resampled[int(tail * RESAMPLES)], resampled[int((1 - tail) * RESAMPLES) - 1]
    return Ratio(math.exp(statistics.median(centres)), math.exp(low), math.exp(high))


def settled(ratio: Ratio) -> bool:
    """Whether the interval is narrow enough. Only the width decides, so taking more samples favours neither verdict."""
    return ratio.high <= SETTLED * ratio.low


def unchanged(ratio: Ratio) -> bool:
    """Whether the ratio shows no change, which needs no control."""
    return settled(ratio) and 1 / WARN <= ratio.value <= WARN


def looks_slower(ratio: Ratio) -> bool:
    """Whether a second batch is needed: the interval lies above 1 and the estimate above FAIL."""
    return ratio.low > 1 and ratio.value > FAIL


def verdict(first: Ratio, second: Ratio | None, control: Ratio) -> str:
    """Return "ok", "faster", "warn", "inconclusive", or "regression" for what looks slower in both batches.

    control: the base against itself.
    """
    if max(control.value, 1 / control.value) > CONTROL or not first.low:  # the machine is too noisy, or one pair
        return "inconclusive"
    if looks_slower(first) and second is not None and looks_slower(second):
        return "regression"
    if first.low > 1 and first.value > WARN:
        return "warn"
    return "faster" if first.high < 1 and first.value < 1 / WARN else "ok"
