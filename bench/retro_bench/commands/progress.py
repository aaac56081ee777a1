"""Progress on standard error, a line per step. Results go to standard output."""

import sys
import time


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Count of the steps of a run. `quiet`: print nothing."""

    def __init__(self, total: int, quiet: bool = False):
        self.total, self.quiet, self.done, self.begun = total, quiet, 0, time.monotonic()

    def step(self, text: str) -> None:
        self.done += 1
        self.note(f"[{self.done}/{self.total}, {time.monotonic() - self.begun:.0f} s] {text}")

    def note(self, text: str) -> None:
        if not self.quiet:
            say(text)
