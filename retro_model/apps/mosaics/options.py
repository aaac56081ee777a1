"""Options of `retro-model mosaics`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from .plans import ABOUT, PLANS


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model mosaics`, in which every field of a plan is an option."""
    top = argparse.ArgumentParser(
        prog="retro-model mosaics", description="The Memory Mosaics paper's demonstrations: train, score, draw."
    )
    commands = top.add_subparsers(dest="experiment", required=True)
    for name, about in ABOUT.items():
        sub = commands.add_parser(name, help=about, description=about)
        sub.add_argument(
            "--out",
            type=Path,
            default=Path(f"{name}-out"),
            help=f"folder for everything that is made (default: {name}-out)",
        )
        sub.add_argument("--plan", choices=PLANS[name], default="default", help="sizes, which the options below change")
        sub.add_argument(
            "--minutes",
            type=float,
            default=math.inf,
            help="begin no training after this many minutes; the same command continues",
        )
        sub.add_argument("--quiet", action="store_true", help="print nothing")
        for field in dataclasses.fields(PLANS[name]["default"]):
            many = isinstance(field.default, tuple)
            kind = type(field.default[0] if many else field.default)
            sub.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kind,
                nargs="+" if many else None,
                metavar=kind.__name__,
                help=f"default: {' '.join(map(str, field.default)) if many else field.default}",
            )
    return top
