"""Options of `retro-model rpt`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

#: names of `cards.VARIANTS`, repeated here so that the help does not load torch
VARIANTS = (
    *("RPT", "RPT, detached", "RPT, own readout", "RPT, detached, own readout"),
    *("RPT-Lex", "RETRO-BM25", "window alone"),
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model rpt`."""
    made = argparse.ArgumentParser(
        prog="retro-model rpt", description="RPT's demonstration: train the missing variants, score them, draw."
    )
    commands = made.add_subparsers(dest="command", required=True)
    cards = commands.add_parser("cards", help="made-up documents whose content returns beyond the window")
    cards.add_argument("--out", type=Path, default=Path("rpt-out"), help="folder for the results (default: rpt-out)")
    cards.add_argument("--reworded", action="store_true", help="give returning cues other tokens, to defeat BM25")
    cards.add_argument(
        "--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"train only these of: {'; '.join(VARIANTS)}"
    )
    cards.add_argument("--steps", type=int, help="training steps of each variant")
    cards.add_argument("--alpha", type=float, help="weight of the retrieval loss (default: 1; reworded: 30)")
    cards.add_argument("--seed", type=int, default=0, help="of documents, weights and batches (default: 0)")
    cards.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after this many minutes; the same command continues"
    )
    cards.add_argument("--smoke", action="store_true", help="use tiny sizes")
    return made
