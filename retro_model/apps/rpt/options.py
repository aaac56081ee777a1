"""Variants and options of `retro-model rpt`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple


class Variant(NamedTuple):
    """Variant of the model and its training.

    changes: of the configuration. neighbours: "own", "bm25" or "none". lexical: the supervision has BM25 scores
    (RPT-Lex). trunk_share: factor on the retrieval loss in the decoder.
    """

    changes: dict
    neighbours: str = "own"
    lexical: bool = False
    trunk_share: float = 1.0


UNTIED = {"tie_embeddings": False}
VARIANTS = {
    "RPT": Variant({}),
    "RPT, detached": Variant({}, trunk_share=0.0),
    "RPT, own readout": Variant(UNTIED),
    "RPT, detached, own readout": Variant(UNTIED, trunk_share=0.0),
    "RPT-Lex": Variant({}, lexical=True),
    "RETRO-BM25": Variant({"retriever": False}, neighbours="bm25"),
    "window alone": Variant({"retriever": False, "cca_layers": ()}, neighbours="none"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model rpt`."""
    about = "RPT's demonstration: train the missing variants, score them, draw."
    made = argparse.ArgumentParser(prog="retro-model rpt", description=about)
    commands = made.add_subparsers(dest="command", required=True)
    cards = commands.add_parser("cards", help="made-up documents whose content returns beyond the window")
    add, names = cards.add_argument, "; ".join(VARIANTS)
    add("--out", type=Path, default=Path("rpt-out"), help="folder for the results (default: rpt-out)")
    add("--reworded", action="store_true", help="give returning cues other tokens, to defeat BM25")
    add("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"train only these of: {names}")
    add("--steps", type=int, help="training steps of each variant")
    add("--alpha", type=float, help="weight of the retrieval loss (default: 1; reworded: 30)")
    add("--seed", type=int, default=0, help="of documents, weights and batches (default: 0)")
    add("--minutes", type=float, default=math.inf, help="stop after this many minutes; the same command continues")
    add("--smoke", action="store_true", help="use tiny sizes")
    return made
