"""Sizes and options of `retro-model retrofit` and `compare`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

#: The contenders of `compare`, and their names in its table.
CONTENDERS = {
    "alone": "decoder alone",
    "longer": "alone, windows twice as long",
    "knn": "kNN-LM, tuned on the other documents",
    "new": "RETRO's new layers, trained",
    "own-all": "own attention, nothing trained, every passage",
    "own": "own attention, nothing trained",
    "own-gates": "own attention, bias and scale trained",
    "own-lora": "own attention, low-rank maps trained too",
    "in-context": "in-context retrieval",
}
DATASTORE_TOKENS = 20_000
ATTENTION = ("own", "new")
#: Learning rates that fit what is added: biases and scales of heads, low-rank maps beside them, or whole layers.
RATES = {"own": 0.05, "low-rank": 0.01, "new": 2e-3}
RANK = 8  # of the low-rank maps in `compare`


@dataclass(frozen=True)
class Plan:
    """Sizes of a library and of its windows. embedder: `tfidf`, or the folder of a frozen encoder. dim: of tfidf.
    database_bytes, held_bytes: characters of the library, of each held-out document; at most. held_out: documents.
    least_similarity: to the chunk, of a passage that own attention reads. passage_chunks: the chunk found and those
    that follow it."""

    chunk_len: int = 32
    neighbours: int = 2
    least_similarity: float = 0.3
    window: int = 256
    stride: int = 128
    database_bytes: int = 2_500_000
    held_out: int = 50
    held_bytes: int = 1500
    embedder: str = "tfidf"
    dim: int = 512
    passage_chunks: int = 2


@dataclass(frozen=True)
class Fit:
    """How to train. minutes: instead of `steps`, as many as fit; of training alone. batch_size: windows a step.
    windows: distinct ones that own attention is trained on, so that their neighbours are read once."""

    steps: int = 50
    minutes: float | None = None
    batch_size: int = 2
    windows: int | None = 24
    max_lr: float = RATES["own"]
    autocast: str | None = None
    seed: int = 0


def compare() -> argparse.ArgumentParser:
    """The parser of `retro-model compare`."""
    made = argparse.ArgumentParser(
        prog="retro-model compare",
        description="Everything a user could do with a decoder and texts, measured on the same held-out documents.",
    )
    add = made.add_argument
    add("decoder", type=Path, nargs="?", help="folder of a causal language model and its tokeniser")
    add("--records", type=Path, nargs="+", metavar="JSON", help="draw these records in one picture and measure nothing")
    _of_both(made, "compare-out")
    names = ", ".join(CONTENDERS)
    add(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=[*CONTENDERS],
        metavar="NAME",
        help=f"score these of {names}",
    )
    add("--documents", type=int, help="number of held-out documents scored, from the first (default: all)")
    add("--random-documents", type=int, help="documents scored with random neighbours too (default: all)")
    for field in dataclasses.fields(Plan):
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    add("--lr", type=float, default=Fit.max_lr, help=f"largest learning rate of own attention (default: {Fit.max_lr})")
    add(
        "--datastore-tokens",
        type=int,
        default=DATASTORE_TOKENS,
        help=f"tokens of kNN-LM's datastore (default: {DATASTORE_TOKENS})",
    )
    add("--keep-states", action="store_true", help="keep neighbours' states on disk between contenders and calls")
    return made


def _of_both(made: argparse.ArgumentParser, out: str) -> None:
    """Options that `retrofit` and `compare` share."""
    add = made.add_argument
    add("--texts", type=Path, metavar="DIR", help="text files; default: the manual pages of this machine")
    add("--out", type=Path, default=Path(out), help=f"folder for all that is made (default: {out})")
    add("--steps", type=int, default=Fit.steps, help=f"training steps; 0: no training (default: {Fit.steps})")
    add("--windows", type=int, default=Fit.windows, help=f"windows that train own attention (default: {Fit.windows})")
    add("--layers", type=int, nargs="+", help="layers that attend neighbours, from 1 (default: all)")
    add("--seed", type=int, default=0)


def retrofit() -> argparse.ArgumentParser:
    """The parser of `retro-model retrofit`."""
    made = argparse.ArgumentParser(
        prog="retro-model retrofit",
        description="Give a decoder a library: database, training of what is added, scores with their control.",
    )
    add = made.add_argument
    add("decoder", type=Path, nargs="?", help="folder of a causal language model and its tokeniser; default: SmolLM2")
    _of_both(made, "retrofit-out")
    add(
        "--attention",
        choices=ATTENTION,
        default="own",
        help="attend neighbours by its own layers or by RETRO's new ones (default: own)",
    )
    add("--minutes", type=float, help="minutes of training, in place of --steps; scoring follows")
    add("--batch", type=int, default=Fit.batch_size, help=f"windows a step (default: {Fit.batch_size})")
    rates = ", ".join(f"{rate} for {name}" for name, rate in RATES.items())
    add("--lr", type=float, help=f"largest learning rate (default: {rates})")
    add("--rank", type=int, default=0, help="train low-rank maps of this rank beside bias and scale (default: none)")
    add("--neighbours", type=int, default=Plan.neighbours, help=f"neighbours of a chunk (default: {Plan.neighbours})")
    least = Plan.least_similarity
    add("--least-similarity", type=float, default=least, help=f"read no passage less similar (default: {least})")
    passage = f"chunks of a neighbour: the one found and those that follow (default: {Plan.passage_chunks})"
    add("--passage-chunks", type=int, default=Plan.passage_chunks, help=passage)
    add("--chunk", type=int, default=Plan.chunk_len, help=f"tokens of a chunk (default: {Plan.chunk_len})")
    add("--window", type=int, default=Plan.window, help=f"tokens read at once (default: {Plan.window})")
    add("--held-out", type=int, default=12, help="documents held out and scored (default: 12)")
    add("--autocast", choices=("bfloat16", "float16"), help="type of matrix products (default: the weights')")
    return made
