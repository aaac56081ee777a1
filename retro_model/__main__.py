"""python -m retro_model demo"""

import sys


def main(arguments: list[str]) -> None:
    """Runs the command that the first argument names."""
    if arguments[:1] != ["demo"]:
        sys.exit("usage: python -m retro_model demo [--help]")
    from retro_model import demo  # not before: it needs the `retrieval` extra

    demo.main(arguments[1:])


main(sys.argv[1:])
