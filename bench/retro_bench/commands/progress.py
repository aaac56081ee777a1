"""Progress on standard error, a line per step. Results go to standard output."""

import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Step = TypeVar("Step")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def until_interrupted(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps. Raise KeyboardInterrupt after Ctrl-C, even if the code that ran caught the exception.

    An import of a C++ module does so, and leaves a module behind that is half imported.
    """
    pressed = []

    def handler(*_):
        pressed.append(True)
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    ours = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, handler)
    try:
        for step in steps:
            if pressed:
                raise KeyboardInterrupt
            yield step
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


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
