"""Progress on standard error: a live line where it is a terminal and rich is there, plain lines otherwise. Results go
to stdout.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class Plain:
    """One line a step, with the time it started."""

    def __init__(self, total: int):
        self.total, self.done, self.begun = total, 0, time.monotonic()

    def step(self, text: str) -> None:
        self.done += 1
        print(f"[{self.done}/{self.total}, {time.monotonic() - self.begun:.0f} s] {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Rich:
    def __init__(self, progress, total: int):
        self.progress, self.task = progress, progress.add_task("", total=total)
        self.first = True

    def step(self, text: str) -> None:
        self.progress.update(self.task, description=text, advance=0 if self.first else 1)
        self.first = False

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def shown(total: int, quiet: bool = False) -> Iterator[Plain | Rich]:
    """Something with `step(text)` and `note(text)`."""
    if quiet:
        silent = Plain(total)
        silent.step = silent.note = lambda text: None
        yield silent
        return
    rich = _rich() if sys.stderr.isatty() else None
    if rich is None:
        yield Plain(total)
        return
    with rich as progress:
        yield Rich(progress, total)


def _rich():
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
