"""`python -m retro_reader COMMAND`, or `retro-reader COMMAND` where the package is installed."""

from __future__ import annotations

import sys

COMMANDS = {"serve": "show in a browser what a model retrieves", "ask": "show it in the terminal"}
HELP = "\n".join(
    [
        "usage: retro-reader COMMAND FOLDER [options]",
        "",
        "Show what a model of `retro-model retrofit` retrieves, and what each word gains by it.",
        "",
        *(f"  {name:<8}{about}" for name, about in COMMANDS.items()),
        "",
        "retro-reader COMMAND --help lists a command's options.",
    ]
)


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(HELP)
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"retro-reader: expected one of {', '.join(COMMANDS)}; got {name}", file=sys.stderr)
        sys.exit(2)  # as argparse does for an unknown option
    if name == "serve":
        from .command import main as run
    else:
        from .ask import main as run
    run(rest)


def command() -> None:
    """The console script `retro-reader`."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command()
