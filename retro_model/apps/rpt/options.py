"""Options of `retro-model rpt`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

VARIANTS = (
    "RPT",
    "RPT, detached",
    "RPT, own readout",
    "RPT, detached, own readout",
    "RPT-Lex",
    "RETRO-BM25",
    "window alone",
)
CORPORA = ("stdlib", "kjv")


def parser() -> argparse.ArgumentParser:
    """The parser."""
    made = argparse.ArgumentParser(
        prog="retro-model rpt",
        description="RPT's demonstrations: train every variant that is not there yet, then score, table and picture.",
    )
    commands = made.add_subparsers(dest="command", required=True)
    command = commands.add_parser("cards", help="made-up documents whose content returns beyond the window")
    command.add_argument(
        "--out", type=Path, default=Path("rpt-out"), help="folder for everything that is made (default: rpt-out)"
    )
    command.add_argument(
        "--reworded", action="store_true", help="a returning cue has other tokens: BM25 cannot find it"
    )
    command.add_argument(
        "--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"train only these of {', '.join(VARIANTS)}"
    )
    command.add_argument("--steps", type=int, help="training steps of each variant")
    command.add_argument("--alpha", type=float, help="weight of the retrieval loss (default: 1; reworded: 30)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    command = commands.add_parser("text", help="long documents: packages of the standard library, books of the Bible")
    command.add_argument(
        "--corpus", choices=CORPORA, default="stdlib", help="kjv needs the command `bible` (bible-kjv)"
    )
    command.add_argument(
        "--out", type=Path, default=Path("rpt-out"), help="folder for everything that is made (default: rpt-out)"
    )
    command.add_argument("--steps", type=int, help="training steps of each model")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    for command in commands.choices.values():
        command.add_argument(
            "--minutes", type=float, default=math.inf, help="stop after so many; the same command goes on where it was"
        )
    return made
