"""Options of `retro-model retrofit`, and the sizes that `compare` shares with it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..neighbours.options import TFIDF, texts

ATTENTION = ("own", "new")
#: Learning rates for heads' biases and scales ("own"), for low-rank maps as well ("low-rank"), and for new layers.
RATES = {"own": 0.05, "low-rank": 0.01, "new": 2e-3}


def _size(default, about: str):
    """Return a field of `Sizes` with the help text of its option."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Sizes:
    """Sizes of a library and of its windows."""

    chunk_len: int = _size(32, "tokens per chunk")
    neighbours: int = _size(2, "neighbours per chunk")
    least_similarity: float = _size(0.3, "smallest similarity of a passage that own attention reads")
    window: int = _size(256, "tokens read at once")
    stride: int = _size(128, "scored tokens per window; the tokens before them are context")
    database_bytes: int = _size(2_500_000, "largest number of characters in the library")
    held_out: int = _size(20, "documents held out and scored")
    held_bytes: int = _size(1500, "largest number of characters per held-out document")
    encoder: str = _size(TFIDF, "tfidf, or the folder of a frozen encoder")
    dim: int = _size(512, "width of tfidf's embeddings")
    passage_chunks: int = _size(2, "chunks per passage: the retrieved chunk and the next ones")


SIZES = {size.name: size for size in fields(Sizes)}
SHORT = {"neighbours": ("-k",)}


@dataclass(frozen=True)
class Fit:
    """Settings of the training.

    batch_size: windows per step. windows: number of distinct windows that own attention trains on; their neighbours are
    encoded once.
    """

    steps: int = 25
    batch_size: int = 2
    windows: int | None = 24
    max_lr: float = RATES["own"]
    autocast: str | None = None
    seed: int = 0


def add_size(made: argparse.ArgumentParser, name: str, *, default=None) -> None:
    """Add an option for a field of `Sizes`. default: a value instead of the field's."""
    default = SIZES[name].default if default is None else default
    options = [*SHORT.get(name, ()), f"--{name.replace('_', '-')}"]
    said = f"{SIZES[name].metadata['help']} (default: {default})"
    made.add_argument(*options, dest=name, type=type(default), default=default, help=said)


def add_shared(made: argparse.ArgumentParser, out: str) -> None:
    """Add the options that `retrofit` and `compare` share."""
    add = made.add_argument
    add("decoder", type=Path, nargs="?", help="folder of a causal language model and its tokeniser; default: SmolLM2")
    add("--texts", type=Path, metavar="DIR", help="folder of texts; default: Python's standard library")
    texts(made)
    add("--out", type=Path, default=Path(out), help=f"folder for the results (default: {out})")
    add("--steps", type=int, default=Fit.steps, help=f"training steps; 0: no training (default: {Fit.steps})")
    add("--windows", type=int, default=Fit.windows, help=f"windows that train own attention (default: {Fit.windows})")
    add("--layers", type=int, nargs="+", help="layers that attend neighbours, from 1 (default: all)")
    add("--seed", type=int, default=0)


def parser() -> argparse.ArgumentParser:
    """Make the parser of `retro-model retrofit`."""
    about = "Give a decoder a library: build it, train the added parameters, and score with a control."
    made = argparse.ArgumentParser(prog="retro-model retrofit", description=about)
    add = made.add_argument
    add_shared(made, "retrofit-out")
    said = "attend neighbours with its own layers or with RETRO's new ones (default: own)"
    add("--attention", choices=ATTENTION, default="own", help=said)
    add("--batch", type=int, default=Fit.batch_size, help=f"windows per step (default: {Fit.batch_size})")
    rates = ", ".join(f"{rate} for {name}" for name, rate in RATES.items())
    add("--lr", type=float, help=f"largest learning rate (default: {rates})")
    add("--rank", type=int, default=0, help="also train low-rank maps of this rank (default: none)")
    add("--prefix", action="store_true", help="choose 64 tokens of the library that every text and passage continues")
    for name in ("neighbours", "least_similarity", "passage_chunks", "window", "database_bytes"):
        add_size(made, name)
    add_size(made, "chunk_len")
    said = f"{SIZES['held_out'].metadata['help']}; 0: none (default: {Sizes.held_out}, or none of a small folder)"
    add("--held-out", type=int, help=said)
    said = f"{TFIDF}, or the folder of a sentence encoder that searches for questions too (default: {TFIDF})"
    add("--encoder", default=TFIDF, help=said)
    add("--autocast", choices=("bfloat16", "float16"), help="type of matrix products (default: the weights')")
    return made
