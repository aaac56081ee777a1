"""check kernels and baselines against the float64 reference

Draws fresh inputs each time. Checks outputs and gradients in every type and prints a line for each case and type. Exit
code 2 if anything fails.
"""

import argparse

from ..records import record
from ..report import terminal
from . import measuring, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_effort(parser)
    parser.add_argument("--json", type=options.output, metavar="FILE", help="append records to this file")


def execute(arguments: argparse.Namespace) -> int:
    selection = options.selection(arguments)
    run = measuring.start(arguments, selection, timed=False)
    writer, records = record.Writer(arguments.json), {}

    def append(measured: dict) -> None:
        records[measured["id"]] = measured
        writer.write(measured)

    measuring.walk(run, selection, arguments, writer, append)
    print(terminal.checks(list(records.values())))
    print(terminal.verdict(list(records.values()), writer.requested, arguments.json))
    return measuring.exit_code(records.values())
