"""render records as a terminal table, Markdown, HTML or PNG

Measures nothing. Of several records with one id the last one counts; the history page shows all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import exits, record
from ..report import html, markdown, png, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=("term", "md", "html", "png"), default="term")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output; needed for png")


def execute(arguments: argparse.Namespace) -> int:
    records = load(arguments.files)
    if arguments.format == "png":
        if arguments.output is None:
            raise exits.UsageError("report --format png: name the file with --output")
        try:
            png.write(records, arguments.output)
        except ImportError:
            raise exits.UsageError("report --format png: needs matplotlib (pip install matplotlib); html needs nothing") from None
        return exits.OK
    latest = list(record.latest(records).values())
    text = {"term": lambda: terminal.full(latest), "md": lambda: markdown.table(latest), "html": lambda: html.page(records)}[
        arguments.format
    ]()
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text)
    return exits.OK


def load(files: list[Path]) -> list[dict]:
    """All records of the files in order. Raises UsageError for a file that is missing, empty or no record file."""
    records = []
    for path in files:
        try:
            records += record.read(path)
        except (OSError, record.BadRecord) as e:
            raise exits.UsageError(str(e)) from None
    if not records:
        raise exits.UsageError(f"no records in {', '.join(map(str, files))}")
    return records
