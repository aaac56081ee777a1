"""Sizes and options of `retro-model demo`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    config: arguments of `RetroConfig.small`; the vocabulary's size is added. database_bytes, train_bytes,
    validation_bytes: most characters to retrieve from, to train on (a part of the database) and to score. dim, index:
    width of the keys; FAISS factory string, None: exact search. neighbours, evaluation_neighbours: K in training; each
    K that is scored. start_copying: begin both models with weights that copy, see `layers.copying`.
    """

    config: dict
    vocab_size: int = 2048
    database_bytes: int = 12_000_000
    train_bytes: int = 2_500_000
    validation_bytes: int = 250_000
    dim: int = 512
    index: str | None = None
    neighbours: int = 2
    evaluation_neighbours: tuple[int, ...] = (2, 10)
    window: int = 512
    stride: int = 256
    batch_size: int = 4
    steps: int = 600
    max_lr: float = 1e-2
    warmup_steps: int = 50
    start_copying: bool = True


#: A decoder with CCA in its last layer, and an encoder of one layer that reads with the decoder's embeddings.
SMALL = {"d_model": 64, "d_ff": 256, "num_heads": 2, "num_layers": 3, "chunk_len": 16, "encoder_d_ff": 128}
SMALL |= {"share_embeddings": True, "max_len": 1024}
DEFAULT = Plan(SMALL)
_FEW = {"vocab_size": 512, "database_bytes": 400_000, "train_bytes": 200_000, "validation_bytes": 30_000, "dim": 64}
_SHORT = {"evaluation_neighbours": (2,), "window": 128, "stride": 64, "steps": 12, "warmup_steps": 2}
SMOKE = Plan(SMALL | {"num_layers": 2}, **_FEW, **_SHORT)
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
    add = made.add_argument
    add("--out", type=Path, default=Path("demo-out"), help="folder for everything that is made (default: demo-out)")
    minutes = "choose the steps so that the whole run takes this many minutes (default: a fixed number of steps)"
    add("--minutes", type=_at_least(0.01), help=minutes)
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--seed", type=_at_least(0), default=0, help="of weights and batches (default: 0)")
    add("--steps", type=_at_least(1), help="training steps of each model")
    add("--smoke", action="store_true", help="use tiny sizes, to see that the command runs")
    return made
