"""`python -m retro_model COMMAND`, or `retro-model COMMAND` where the package is installed."""

import importlib
import sys

#: command -> the module whose `main(arguments)` runs it; imported when named, for each needs an extra of its own
COMMANDS = {
    "demo": "retro_model.demo.command",
    "mosaics": "retro_model.demo.memory_mosaics.command",
    "rpt": "retro_model.demo.rpt.command",
    "retrofit": "retro_model.demo.retrofit",
    "ask": "retro_model.serving.ask",
    "serve": "retro_model.serving.command",
    "scale": "retro_model.scale.command",
    "neighbours": "retro_model.commands.neighbours",
    "scaling": "retro_model.commands.scaling",
    "knn-lm": "retro_model.commands.knn_lm",
    "lm-eval": "retro_model.commands.harness",
}
USAGE = f"usage: retro-model {{{','.join(COMMANDS)}}} [--help]"


def main(arguments: list[str]) -> None:
    """Runs the command that the first argument names."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if not arguments or arguments[0] not in COMMANDS:
        sys.exit(USAGE)
    importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])


def command() -> None:
    """The console script `retro-model`."""
    main(sys.argv[1:])


if __name__ == "__main__":
    command()
