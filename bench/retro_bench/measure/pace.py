"""Pace of a run with a deadline: how much effort each step may have."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_SHARE = 0.1  # of the usual effort; below it a time means nothing
LEARNT = 3  # steps after which this machine's speed is known


@dataclass
class Pace:
    """Pace of a run. `work`: expected seconds of each step on a quiet machine. `limit`: seconds for all, or None."""

    work: list[float]
    limit: float | None = None
    clock: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self):
        self.begun = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self.begun

    def over(self) -> bool:
        return self.limit is not None and self.spent >= self.limit

    def share(self, done: int) -> float:
        """Return the share of the usual effort for the step after the first `done`: below 1 if time is short."""
        if self.limit is None:
            return 1.0
        expected = sum(self.work[:done])
        slowness = max(self.spent / expected, 1.0) if done >= LEARNT and expected else 1.0
        needed = slowness * sum(self.work[done:])
        return min(1.0, max(LEAST_SHARE, (self.limit - self.spent) / needed)) if needed else 1.0
