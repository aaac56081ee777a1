"""python -m retro_model mosaics {moons,regbench,text}: each trains, scores, prints tables and draws pictures."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
from pathlib import Path

from . import moons, regbench, text

EXPERIMENTS = {"moons": moons, "regbench": regbench, "text": text}
#: named plans: what `--plan` chooses from
PLANS = {
    "moons": {
        "default": moons.Plan(),
        "smoke": moons.SMOKE,
        "paper": moons.Plan(length=800, batch_size=64, sequences=512),
    },
    "regbench": {"default": regbench.Plan(), "smoke": regbench.SMOKE, "thorough": regbench.THOROUGH},
    "text": {"default": text.Plan(), "smoke": text.SMOKE, "kjv": text.KJV},
}


def parser() -> argparse.ArgumentParser:
    """Every field of an experiment's plan is an option."""
    top = argparse.ArgumentParser(prog="retro-model mosaics", description=__doc__.split(": ", 1)[1])
    commands = top.add_subparsers(dest="experiment", required=True)
    for name, module in EXPERIMENTS.items():
        sub = commands.add_parser(
            name, help=module.__doc__.split("\n\n")[0], description=module.__doc__.split("\n\n")[0]
        )
        sub.add_argument(
            "--out",
            type=Path,
            default=Path(f"{name}-out"),
            help=f"folder for everything that is made (default: {name}-out)",
        )
        sub.add_argument(
            "--plan", choices=PLANS[name], default="default", help="sizes; single ones can be changed below"
        )
        sub.add_argument(
            "--minutes",
            type=float,
            default=math.inf,
            help="begin no training after so many; the same command goes on later",
        )
        sub.add_argument("--quiet", action="store_true", help="print nothing")
        for field in dataclasses.fields(module.Plan):
            many = isinstance(field.default, tuple)
            kind = type(field.default[0] if many else field.default)
            sub.add_argument(
                f"--{field.name.replace('_', '-')}", type=kind, nargs="+" if many else None, metavar=kind.__name__
            )
    return top


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = vars(parser().parse_args(arguments))
    name, folder, plan, quiet, minutes = (options.pop(key) for key in ("experiment", "out", "plan", "quiet", "minutes"))
    changes = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if value is not None
    }
    importlib.import_module("matplotlib")  # before minutes of training, not after
    EXPERIMENTS[name].run(folder, dataclasses.replace(PLANS[name][plan], **changes), quiet=quiet, minutes=minutes)
