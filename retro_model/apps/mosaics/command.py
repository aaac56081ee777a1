"""retro-model mosaics {moons,regbench,text}: train, score, print tables and draw pictures."""

from __future__ import annotations

import dataclasses
import importlib

from . import moons, regbench, text
from .options import PLANS, parser

EXPERIMENTS = {"moons": moons, "regbench": regbench, "text": text}


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model mosaics`."""
    options = vars(parser().parse_args(arguments))
    name, folder, plan, quiet, minutes = (options.pop(key) for key in ("experiment", "out", "plan", "quiet", "minutes"))
    given = {key: value for key, value in options.items() if value is not None}
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    importlib.import_module("matplotlib")  # before minutes of training, not after
    EXPERIMENTS[name].run(folder, dataclasses.replace(PLANS[name][plan], **changes), quiet=quiet, minutes=minutes)
