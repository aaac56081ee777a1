"""render records as text, Markdown or HTML

Measures nothing. The last of several records with one id counts; `history` shows all. Refuses records of different
machines (exit code 6).
"""

import argparse
from pathlib import Path

from ..records import machines, record
from ..report import html, markdown, terminal
from . import exits, options
from .progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=("term", "md", "html"), default="term")
    where = "write to this file (default: standard output)"
    parser.add_argument("--output", type=options.output, metavar="FILE", help=where)


def execute(arguments: argparse.Namespace) -> int:
    records = [one for path in arguments.files for one in options.records(path)]
    requested = [one for path in arguments.files for one in record.requested(path)]
    if not records and not requested:
        raise exits.UsageError(f"no records in {', '.join(map(str, arguments.files))}")
    if why := machines.difference(records, records):
        say(f"retro-bench: expected records of one machine: {why}")
        return exits.NOT_COMPARED
    latest = list(record.latest(records).values())
    draw = {"term": terminal.full, "md": markdown.table, "html": html.page}[arguments.format]
    text = draw(latest, requested)
    if arguments.output is None:
        print(text)
        return exits.OK
    arguments.output.write_text(text, encoding="utf-8")
    print(f"{'Page:     ' if arguments.format == 'html' else 'written: '}{arguments.output}")
    return exits.OK
