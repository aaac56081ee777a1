"""The program `retro-model`, which is `python -m retro_model` in a checkout: `COMMANDS` lists its commands.

A command is a package here. Its module `command` has `main(arguments)`, which runs it. Its module `options` has
`parser()` and does not load torch, so that help and errors in options appear at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys

#: Name of each command and its line in the help.
COMMANDS = {
    "retrofit": "give a decoder a library",
    "compare": "score a retrofitted decoder next to baselines",
    "neighbours": "make tokens, keys and neighbours of documents",
    "lm-eval": "run the evaluation harness on a trained model",
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


def module(name: str, part: str):
    """Import a module of a command's package. part: "command" or "options"."""
    return importlib.import_module(f"retro_model.commands.{name.replace('-', '_')}.{part}")


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
        module(name, "options").parser().parse_args(rest)
    module(name, "command").main(rest)


def command() -> None:
    """The console script `retro-model`."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("retro-model: stopped; the same command continues from what was saved", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    command()
