"""`python -m retro_model COMMAND`, or `retro-model COMMAND` where the package is installed.

A command's options are in a module that does not load torch, so that help and option errors appear at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NamedTuple

APPS = "retro_model.apps"


class Command(NamedTuple):
    """Entry of `COMMANDS`.

    about: its line in the help. module: has `main(arguments)`, which runs the command. options: "module:function" of
    the function that makes the parser.
    """

    about: str
    module: str
    options: str


COMMANDS = {
    "retrofit": Command("give a decoder a library", "library.retrofit", "library.options:retrofit"),
    "compare": Command("score a retrofitted decoder beside baselines", "library.compare", "library.options:compare"),
    "neighbours": Command(
        "make tokens, keys and neighbours of documents", "evaluate.neighbours", "evaluate.options:neighbours"
    ),
    "lm-eval": Command("run the evaluation harness on a trained model", "evaluate.lm_eval", "evaluate.options:lm_eval"),
}
#: commands of earlier versions -> where they are now
MOVED = {name: f"`retro-reader {name}`; pip install retro-reader" for name in ("serve", "ask")}
MOVED |= {"demo": "examples/retro_python.py", "rpt": "examples/rpt_cards.py"}
MOVED |= {"mosaics": "examples/moons.py, examples/regbench.py and examples/mosaics_text.py"}
HELP = "\n".join(
    [
        "usage: retro-model COMMAND [options]",
        "",
        "Models that retrieve. Begin with `retro-model retrofit`, then `retro-reader serve retrofit-out`.",
        "",
        *(f"  {name:<12}{command.about}" for name, command in COMMANDS.items()),
        "",
        "retro-model COMMAND --help lists a command's options; retro-model --version prints the version.",
    ]
)


def parser(name: str):
    """Return the parser of a command's options."""
    module, function = COMMANDS[name].options.split(":")
    return getattr(importlib.import_module(f"{APPS}.{module}"), function)()


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(HELP)
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name == "--version":
        from retro_kernels import __version__

        print(f"retro-model {__version__}")
        return
    if name in MOVED:
        sys.exit(f"retro-model: expected one of {', '.join(COMMANDS)}; got {name}, which is now {MOVED[name]}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        sys.exit(
            f"retro-model: expected one of {', '.join(COMMANDS)}; got {name}"
            + "".join(f" (did you mean {one}?)" for one in near)
        )
    asked = {"-h", "--help"} & {*rest[: 1 if name == "lm-eval" else 2]}  # lm-eval has commands with help of their own
    if asked:
        parser(name).parse_args(rest)
    importlib.import_module(f"{APPS}.{COMMANDS[name].module}").main(rest)


def command() -> None:
    """The console script `retro-model`."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("retro-model: stopped; the same command continues from what was saved", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    command()
