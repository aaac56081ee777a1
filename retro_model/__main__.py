"""`python -m retro_model COMMAND`, or `retro-model COMMAND` where the package is installed."""

import importlib
import sys

#: command -> the module whose `main(arguments)` runs it; imported when named, for each needs an extra of its own
COMMANDS = {
    "demo": "retro_model.apps.demo.command",
    "mosaics": "retro_model.apps.mosaics.command",
    "rpt": "retro_model.apps.rpt.command",
    "retrofit": "retro_model.apps.library.retrofit",
    "compare": "retro_model.apps.library.compare",
    "ask": "retro_model.apps.serve.ask",
    "serve": "retro_model.apps.serve.command",
    "scale": "retro_model.apps.scale.command",
    "neighbours": "retro_model.apps.evaluate.neighbours",
    "scaling": "retro_model.apps.evaluate.scaling",
    "knn-lm": "retro_model.apps.evaluate.knn_lm",
    "lm-eval": "retro_model.apps.evaluate.lm_eval",
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
