"""Progress bars on standard error, by tqdm: over training steps and scored documents."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_IN_A_FILE = 10.0  # between two bars, where standard error is a file
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
    with _bar(title, steps) as bar:
        smooth, tokens, began = None, 0, time.perf_counter()

        def report(step: int, results: dict) -> None:
            nonlocal smooth, tokens
            smooth = results["loss"] if smooth is None else 0.95 * smooth + 0.05 * results["loss"]
            tokens += results["tokens"]
            waiting = f", {results['waiting']:.0%} waiting for data" if results.get("waiting", 0) > 0.05 else ""
            speed = tokens / (time.perf_counter() - began)
            bar.set_postfix_str(f"loss {smooth:.3f}, {speed:,.0f} tokens/s{waiting}", refresh=False)
            bar.update()

        yield report


@contextlib.contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager: a bar. Yields `report(done, total)`, which `evaluation.score` calls."""
    with _bar(title) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


def _bar(title: str, total: int | None = None):
    """Return a bar of tqdm, which is rarely drawn again where standard error is a file."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs tqdm (pip install tqdm)") from error
    return tqdm(desc=title, total=total, mininterval=0.1 if sys.stderr.isatty() else SECONDS_IN_A_FILE)
