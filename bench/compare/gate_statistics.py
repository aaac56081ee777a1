"""Statistics of `ab`: ratio of medians, cluster bootstrap over worker pairs, and the verdict. Pure functions of
numbers.

A process pair is the unit of chance: memory layout, page placement and clock state are drawn once a process, so samples
within a pair are no independent evidence. Comparing two pooled means raises false alarms by the dozen on a shared
machine.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

RESAMPLES = 2000
CONFIDENCE = 0.95
WARN, FAIL, CONTROL = 1.03, 1.05, 1.02
SETTLED = 1.05  # high over low; a wider interval could hide a regression

#: samples of one worker pair: times of the base and times of the head, taken in ABBA order
Pair = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Ratio:
    """Head over base: above 1 the head is slower. `low`, `high`: bootstrap interval."""

    value: float
    low: float
    high: float


def pair_ratio(pair: Pair) -> float:
    """Median of the ratios of neighbours: adjacent samples of A and B saw the same machine."""
    base, head = pair
    return statistics.median(b / a for a, b in zip(base, head, strict=True))


def ratio(pairs: list[Pair], seed: int = 0) -> Ratio:
    """Median over worker pairs of their medians. Its interval comes from resampling whole pairs."""
    centres = [math.log(pair_ratio(pair)) for pair in pairs]
    rng = random.Random(seed)
    resampled = sorted(statistics.median(rng.choices(centres, k=len(centres))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = resampled[int(tail * RESAMPLES)], resampled[int((1 - tail) * RESAMPLES) - 1]
    return Ratio(math.exp(statistics.median(centres)), math.exp(low), math.exp(high))


def settled(ratio: Ratio) -> bool:
    """Whether the interval is narrow enough. Only its width decides, so that sampling on favours no verdict."""
    return ratio.high <= SETTLED * ratio.low


def unchanged(ratio: Ratio) -> bool:
    """Whether there is plainly no change: a control could only confirm it."""
    return settled(ratio) and 1 / WARN <= ratio.value <= WARN


def looks_slower(ratio: Ratio) -> bool:
    """Whether a second batch is needed: the interval lies above 1 and the estimate beyond FAIL."""
    return ratio.low > 1 and ratio.value > FAIL


def verdict(first: Ratio, second: Ratio | None, control: Ratio) -> str:
    """ok | faster | warn | regression | inconclusive.

    A regression is beyond FAIL, with an interval above 1, in both batches. Where base against itself is beyond CONTROL,
    the machine is too noisy for a verdict.
    """
    if max(control.value, 1 / control.value) > CONTROL:
        return "inconclusive"
    if looks_slower(first) and second is not None and looks_slower(second):
        return "regression"
    if first.low > 1 and first.value > WARN:
        return "warn"
    return "faster" if first.high < 1 and first.value < 1 / WARN else "ok"
