"""Progress bars on standard error, by rich: over training steps and scored documents."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_A_LINE = 10.0  # between two lines, where standard error is a file
#: Control characters but line ends and tabs, and characters that change the order of the text around them.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace the control characters of untrusted text by their pictures or by U+FFFD, for a terminal."""
    return CONTROLS.sub(lambda c: chr(0x2400 + ord(c[0])) if c[0] < " " else "\ufffd", text)


def hide_theirs() -> None:
    """Switch off the bars of the Hugging Face library where standard error is a file, which they would fill."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextlib.contextmanager
def training(title: str, steps: int) -> Iterator[Callable[[int, dict], None]]:
    """Context manager: a bar over `steps`. Yields the `report` for `training.train`.

    The bar shows the smoothed loss, tokens a second and the time left.
    """
    with _bar() as bar:
        task = bar.add_task(title, total=steps, note="")
        smooth = None

        def report(step: int, results: dict) -> None:
            nonlocal smooth
            smooth = results["loss"] if smooth is None else 0.95 * smooth + 0.05 * results["loss"]
            speed = bar.tasks[task].speed
            tokens = f", {speed * results['tokens']:,.0f} tokens/s" if speed else ""
            waiting = f", {results['waiting']:.0%} waiting for data" if results.get("waiting", 0) > 0.05 else ""
            bar.update(task, advance=1, note=f"loss {smooth:.3f}{tokens}{waiting}")

        yield report


@contextlib.contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager: a bar. Yields `report(done, total)`, which `evaluation.score` calls."""
    with _bar() as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar():
    """Return a bar of rich, which prints a line every SECONDS_A_LINE where standard error is a file."""
    try:
        from rich import console, progress
    except ImportError as error:
        raise ImportError("a progress bar needs rich (pip install rich)") from error

    class Lines(progress.Progress):
        """Progress as lines of text."""

        said = -SECONDS_A_LINE  # time of the last line

        def add_task(self, *args, **options):
            number = super().add_task(*args, **options)
            self._line(number)
            return number

        def update(self, task_id, **options) -> None:
            super().update(task_id, **options)
            self._line(task_id)

        def _line(self, number) -> None:
            task, now = self.tasks[number], time.monotonic()
            if now - self.said < SECONDS_A_LINE and not task.finished:
                return
            self.said = now
            done = f"{task.completed:,.0f} of {task.total:,.0f}" if task.total else "begins"
            left = f"{task.time_remaining:.0f} s left" if task.time_remaining else ""
            parts = ", ".join(part for part in (done, task.fields["note"], left) if part)
            print(f"{task.description}: {parts}", file=sys.stderr, flush=True)

    error = console.Console(stderr=True)
    said = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
    times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    columns = *said, progress.TextColumn("{task.fields[note]}"), *times
    return progress.Progress(*columns, console=error) if error.is_terminal else Lines(*columns, disable=True)
