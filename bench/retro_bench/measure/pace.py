"""Pace of a run with a deadline: how much effort each step may have, and which baselines it may call."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LEAST_SHARE = 0.1  # share of the usual effort; a time with less means nothing
CALLS = 2  # calls of a slow baseline: one is checked, one is timed
LEARNT = 3  # steps after which this machine's speed is known


@dataclass
class Pace:
    """Pace of a run. `work`: expected seconds of each step on a quiet machine. `limit`: seconds for all, or None.

    The kernels of the first `required` steps run in any case, so that every op has a time. Baselines share the rest.
    """

    work: list[float]
    limit: float | None = None
    required: int = 0
    begun: float = field(default_factory=lambda: time.monotonic())
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    done: int = 0  # steps
    #: type -> seconds of the slowest call of a baseline
    longest: dict[str, float] = field(default_factory=dict)
    baselines: float = 0.0  # seconds of all baselines
    start: float = field(init=False)  # seconds before the first step

    def __post_init__(self):
        self.start = self.spent

    @property
    def spent(self) -> float:
        return self.clock() - self.begun

    def over(self) -> bool:
        """Whether the limit is reached and every required step is done."""
        return self.limit is not None and self.spent >= self.limit and self.done >= self.required

    def share(self) -> float:
        """Return the share of the usual effort for the next step: below 1 if time is short."""
        if self.limit is None:
            return 1.0
        expected = sum(self.work[: self.done])
        slowness = max(self.spent / expected, 1.0) if self.done >= LEARNT and expected else 1.0
        needed = slowness * sum(self.work[self.done :])
        return min(1.0, max(LEAST_SHARE, (self.limit - self.spent) / needed)) if needed else 1.0

    def count(self, dtype: str, seconds: float, slow: float) -> None:
        """Note the seconds that a baseline took, and the seconds of a call if the baseline is slow (else 0).

        A first call may import a library or compile, which says nothing about the next baseline.
        """
        self.baselines += seconds
        self.longest[dtype] = max(slow, self.longest.get(dtype, 0.0))

    def affords(self, dtype: str, yardstick: bool) -> bool:
        """Whether the next baseline may run. It is expected to be as slow as the slowest baseline of its type.

        Enough time must remain for the kernels of the required steps, and for their yardsticks unless this baseline is
        a yardstick itself.
        """
        if self.limit is None:
            return True
        one = CALLS * self.longest.get(dtype, max(self.longest.values(), default=0.0))
        later = max(self.required - self.done - 1, 0)
        own = self.spent - self.start - self.baselines
        kernels = own / self.done if self.done >= LEARNT else self.work[0]
        return self.spent + one + (later + 1) * kernels + (0 if yardstick else later * one) <= self.limit
