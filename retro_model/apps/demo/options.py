"""Options of `retro-model demo`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

ABOUT = "RETRO end to end on the sources of Python's standard library: corpus, database, training, evaluation."


def _at_least(low: int | float) -> Callable[[str], int | float]:
    """For argparse: a number of low's type."""

    def number(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value < math.inf:  # NaN included
            raise argparse.ArgumentTypeError(f"expected a number of at least {low}; got {text}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """The parser."""
    made = argparse.ArgumentParser(prog="retro-model demo", description=ABOUT)
    made.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for everything that is made (default: demo-out)"
    )
    made.add_argument(
        "--minutes",
        type=_at_least(0.01),
        help="plan the whole run for this many minutes by its first steps (default: a fixed number of steps)",
    )
    made.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    made.add_argument("--seed", type=_at_least(0), default=0)
    made.add_argument("--steps", type=_at_least(1), help="training steps of each model")
    made.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    return made
