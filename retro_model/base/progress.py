"""Progress bars on standard error, by rich: over the items of a build, and over the steps of a training.

`bench` has its own: it measures trees of any age, and may lean on none of their packages.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sized

#: what makes a terminal do something, or shows text in another order than it has; line ends and tabs are none
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from strangers for a terminal: control characters as pictures of themselves, or as U+FFFD."""
    return CONTROLS.sub(lambda c: chr(0x2400 + ord(c[0])) if c[0] < " " else "\ufffd", text)


def track(items: Iterable, title: str, *, total: int | None = None, enabled: bool = False) -> Iterator:
    """The items, with a bar if `enabled`. total: of the items, where they do not say."""
    if not enabled:
        return iter(items)
    return _tracked(_bar(), items, title, len(items) if total is None and isinstance(items, Sized) else total)


def _tracked(bar, items: Iterable, title: str, total: int | None) -> Iterator:
    with bar:
        task = bar.add_task(title, total=total, note="")
        for item in items:
            yield item
            bar.advance(task)


@contextlib.contextmanager
def training(title: str, steps: int, quiet: bool = False) -> Iterator[Callable[[int, dict], None]]:
    """A bar over `steps`; yields a `report` for `training.train`: loss (smoothed), tokens a second, time left."""
    with _bar(disable=quiet) as bar:
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


def _bar(disable: bool = False):
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError as error:
        raise ImportError("a progress bar needs rich (pip install rich)") from error

    said = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    return Progress(*said, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), disable=disable)
