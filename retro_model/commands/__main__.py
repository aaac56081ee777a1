"""The program `retro-model`, which is `python -m retro_model` in a checkout: `COMMANDS` lists its commands.

A command is a module with `main(arguments)`, which runs it. Its parser is in `options`, which does not load torch, so
that help appears at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys

from . import options

#: Name of each command and its line in the help.
COMMANDS = {
    "retrofit": "give a decoder a library",
    "compare": "score a retrofitted decoder next to baselines",
    "neighbours": "make tokens, keys and neighbours of documents",
    "lm-eval": "run the evaluation harness on a trained model",
}
MODULES = {
    "retrofit": "retrofit.command",
    "compare": "compare.command",
    "neighbours": "neighbours",
    "lm-eval": "lm_eval",
}
HELP = "\n".join(
    [
        "usage: retro-model COMMAND [options]",
        "",
        "Models that retrieve. Begin with `retro-model retrofit`, then `retro-reader serve retrofit-out`.",
        "",
        *(f"  {name:<12}{about}" for name, about in COMMANDS.items()),
        "",
        "retro-model COMMAND --help lists a command's options; retro-model --version prints the version.",
    ]
)


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    return getattr(options, name.replace("-", "_"))()


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
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        said = f"retro-model: expected one of {', '.join(COMMANDS)}; got {name}"
        print(said + "".join(f" (did you mean {one}?)" for one in near), file=sys.stderr)
        sys.exit(2)  # as argparse does for an unknown option
    asked = {"-h", "--help"} & {*rest[: 1 if name == "lm-eval" else 2]}  # lm-eval has commands with help of their own
    if asked:
        parser(name).parse_args(rest)
    importlib.import_module(f"retro_model.commands.{MODULES[name]}").main(rest)


def command() -> None:
    """The console script `retro-model`."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("retro-model: stopped; the same command continues from what was saved", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    command()
