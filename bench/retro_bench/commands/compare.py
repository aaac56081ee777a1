"""compare two files of records

Measures nothing. Exit code 1: a kernel broke or vanished, or static metrics got worse. 6: the files come from different
machines, or a case changed. Slow-downs are shown and do not fail: `ab` measures them properly.
"""

import argparse
from pathlib import Path

from ..compare import record_files
from ..records import machines
from ..report import markdown, tables
from . import exits
from .report import load

HEADER = ("measurement", "change", "detail", "ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="records before the change")
    parser.add_argument("b", type=Path, metavar="B", help="records after the change")
    parser.add_argument("--format", choices=("term", "md"), default="term")


def execute(arguments: argparse.Namespace) -> int:
    a, b = load([arguments.a]), load([arguments.b])
    why, changes = machines.difference(a, b), record_files.changes(a, b)
    if not any(record["role"] != "baseline" for record in a):
        why = f"{arguments.a} holds no record of a kernel"
    if why:
        print(f"not comparable: {why}; times are left out")
        changes = [change for change in changes if change.ratio is None]
    lines = [(c.id, c.kind, c.detail, f"{c.ratio:.3f}" if c.ratio else "-") for c in changes]
    if not lines and not why:
        print("no differences")
    elif arguments.format == "md":
        rows = markdown.folded(markdown.header(HEADER), list(map(markdown.line, lines)))
        print(markdown.MARKER, *rows, sep="\n")
    else:
        print(tables.align([HEADER, *lines]))
    if any(change.fails for change in changes):
        return exits.REGRESSION
    return exits.NOT_COMPARED if why or any(change.kind == "changed" for change in changes) else exits.OK
