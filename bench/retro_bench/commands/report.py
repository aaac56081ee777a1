"""render records as text, Markdown, HTML or PNG

Measures nothing. The last of several records with one id counts; `history` shows all. Refuses records of different
machines (exit code 3).
"""

import argparse
from pathlib import Path

from ..records import machines, record
from ..report import figures, html, markdown, terminal
from . import exits, options
from .progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=("term", "md", "html", "png"), default="term")
    where = "write to this file (default: standard output; png needs one)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=where)


def execute(arguments: argparse.Namespace) -> int:
    records = load(arguments.files)
    if why := machines.difference(records, records):
        say(f"retro-bench: expected records of one machine: {why}")
        return exits.INCONCLUSIVE
    if arguments.format == "png":
        if arguments.output is None:
            raise exits.UsageError("report --format png: name the file with --output")
        if not any(r["time"] and r["role"] != "baseline" for r in records):
            raise exits.UsageError("report --format png: no kernel was timed; there is nothing to draw")
        try:
            figures.write(records, arguments.output)
        except ImportError:
            raise exits.UsageError("report --format png: needs matplotlib (pip install matplotlib)") from None
    else:
        latest = list(record.latest(records).values())
        requested = [one for path in arguments.files for one in record.requested(path)]
        if arguments.format == "md":
            text = markdown.table(latest, requested)
        else:
            text = html.page(latest, requested) if arguments.format == "html" else terminal.full(latest, requested)
        if arguments.output is None:
            print(text)
            return exits.OK
        arguments.output.write_text(text, encoding="utf-8")
    print(f"{'Page:     ' if arguments.format == 'html' else 'written: '}{arguments.output}")
    return exits.OK


def load(files: list[Path]) -> list[dict]:
    """Read all records of the files in order. Raises UsageError for a file that holds none, or something else."""
    records = [one for path in files for one in options.records(path)]
    if not records:
        raise exits.UsageError(f"no records in {', '.join(map(str, files))}")
    return records
