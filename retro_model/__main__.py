"""python -m retro_model demo"""

import sys

USAGE = "usage: python -m retro_model demo [--help]"


def main(arguments: list[str]) -> None:
    """Runs the command that the first argument names."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if arguments[:1] != ["demo"]:
        sys.exit(USAGE)
    from retro_model.demo import command  # not before: it needs the `retrieval` extra

    command.main(arguments[1:])


main(sys.argv[1:])
