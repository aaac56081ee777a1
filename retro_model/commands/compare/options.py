"""Options of `retro-model compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..retrofit.options import SIZES, Fit, Sizes, add_shared, add_size

#: The contenders of `compare`, and their names in its table.
CONTENDERS = {
    "alone": "decoder alone",
    "alone+prefix": "decoder alone, shared prefix",
    "longer": "alone, windows twice as long",
    "knn": "kNN-LM, tuned on the other documents",
    "new": "RETRO's new layers, trained",
    "own-all": "own attention, nothing trained, every passage",
    "own": "own attention, nothing trained",
    "own+prefix": "own attention, nothing trained, shared prefix",
    "own-gates": "own attention, bias and scale trained",
    "own-gates+prefix": "own attention, bias and scale trained, shared prefix",
    "own-lora": "own attention, low-rank maps trained too",
    "in-context": "in-context retrieval",
    "in-context+prefix": "in-context retrieval, shared prefix",
}
DATASTORE_TOKENS = 20_000
RANK = 8  # rank of the low-rank maps
#: In-context retrieval computes a window again for every chunk, so all contenders have a stride of one chunk: each of
#: them but `longer` then sees the same text of its own.
COMPARED = {"stride": Sizes.chunk_len}


def parser() -> argparse.ArgumentParser:
    """Make the parser of `retro-model compare`."""
    about = "Score a decoder with each way to use a library, on the same held-out documents."
    made = argparse.ArgumentParser(prog="retro-model compare", description=about)
    add = made.add_argument
    add("--records", type=Path, nargs="+", metavar="JSON", help="draw these records in one picture and measure nothing")
    said = "ask these questions about --texts instead, and count the right replies; see `compare.questions`"
    add("--questions", type=Path, metavar="JSONL", help=said)
    said = "folder of `retro-model retrofit`; its trained bias and scale answer --questions too"
    add("--gates", type=Path, metavar="DIR", help=said)
    add_shared(made, "compare-out")
    every = {"nargs": "+", "choices": CONTENDERS, "default": [*CONTENDERS]}
    add("--contenders", **every, metavar="NAME", help=f"score these of {', '.join(CONTENDERS)}")
    add("--documents", type=int, help="number of held-out documents scored, from the first (default: all)")
    add("--random-documents", type=int, help="documents scored with the control too (default: all)")
    for name in SIZES:
        add_size(made, name, default=COMPARED.get(name))
    add("--lr", type=float, default=Fit.max_lr, help=f"largest learning rate of own attention (default: {Fit.max_lr})")
    said = f"tokens of kNN-LM's datastore (default: {DATASTORE_TOKENS})"
    add("--datastore-tokens", type=int, default=DATASTORE_TOKENS, help=said)
    add("--keep-states", action="store_true", help="save neighbours' states on disk for other contenders and calls")
    return made
