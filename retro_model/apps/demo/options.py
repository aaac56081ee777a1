"""Options of `retro-model demo`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

ABOUT = "RETRO end to end on the sources of Python's standard library: corpus, database, training, evaluation."


def _at_least(low: int | float) -> Callable[[str], int | float]:
    """Return a type for argparse: a number of the type of `low`, and at least `low`."""

    def number(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value < math.inf:  # NaN included
            raise argparse.ArgumentTypeError(f"expected a number of at least {low}; got {text}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model demo`."""
    made = argparse.ArgumentParser(prog="retro-model demo", description=ABOUT)
    made.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for everything that is made (default: demo-out)"
    )
    made.add_argument(
        "--minutes",
        type=_at_least(0.01),
        help="choose the steps so that the whole run takes this many minutes (default: a fixed number of steps)",
    )
    made.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    made.add_argument("--seed", type=_at_least(0), default=0, help="of weights and batches (default: 0)")
    made.add_argument("--steps", type=_at_least(1), help="training steps of each model")
    made.add_argument("--smoke", action="store_true", help="use tiny sizes, to see that the command runs")
    return made
