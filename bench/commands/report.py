"""render records as text, Markdown, HTML or PNG

Measures nothing. The last of several records with one id counts; `history` shows all. Refuses records of different
machines (exit code 3).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..records import machines, record
from ..report import figures, html, markdown, terminal
from . import exits, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=("term", "md", "html", "png"), default="term")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write to this file (default: standard output; png needs one)"
    )


def execute(arguments: argparse.Namespace) -> int:
    records = load(arguments.files)
    if why := machines.difference(records, records):
        print(f"retro-bench: expected records of one machine: {why}", file=sys.stderr)
        return exits.INCONCLUSIVE
    if arguments.format == "png":
        if arguments.output is None:
            raise exits.UsageError("report --format png: name the file with --output")
        if not any(r["time"] and r["role"] != "baseline" for r in records):
            raise exits.UsageError("report --format png: no kernel was timed; there is nothing to draw")
        try:
            figures.write(records, arguments.output)
            print(f"written: {arguments.output}")
        except ImportError:
            raise exits.UsageError("report --format png: needs matplotlib (pip install matplotlib)") from None
        return exits.OK
    latest = list(record.latest(records).values())
    text = {
        "term": lambda: terminal.full(latest),
        "md": lambda: markdown.table(latest),
        "html": lambda: html.page(records),
    }[arguments.format]()
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
        print(f"written: {arguments.output}")
    return exits.OK


def load(files: list[Path]) -> list[dict]:
    """Read all records of the files in order. Raises UsageError for a file that holds none, or something else."""
    records = []
    for path in files:
        records += options.records(path)
    if not records:
        raise exits.UsageError(f"no records in {', '.join(map(str, files))}")
    return records
