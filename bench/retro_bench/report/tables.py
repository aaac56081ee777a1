"""Tables for a terminal, drawn by rich. Columns that do not fit are dropped. A file or a pipe gets all of them."""

import io
import os
import re
import shutil
import sys
import textwrap

GAP = 2  # spaces between columns
RED = re.compile(r"^(numerics_fail|numerics|oom|error|regression|vanished|broke|static)$|%!$|^[1-9]\d* spills")
NUMBER = re.compile(r"^(-|[-+]?[\d.]+(e[-+]?\d+)?( ?(%|%!|x|s|ms|us|ns|M|MB|GiB))?)$")


def width() -> int | None:
    """Return the longest line: the terminal's width, or COLUMNS where that is set. None: no limit."""
    drawn = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size((80, 24)).columns if drawn else None


def align(table: list[tuple[str, ...]], drop: tuple[str, ...] = ()) -> str:
    """Format a table, whose first row is the header. Columns in `drop` are left out in order until it fits."""
    room = width()
    header, lines = table[0], table[1:]
    kept = list(range(len(header)))
    for name in drop if room else ():
        if _natural(table, kept) <= room:
            break
        if name in header:
            kept.remove(header.index(name))
    rows = [tuple(line[i] for i in kept) for line in table]
    try:
        text = _rich(rows[0], rows[1:], room or _natural(table, kept) + GAP)
    except ImportError:
        text = _plain(rows)
    gone = [name for i, name in enumerate(header) if i not in kept]
    if not gone or not lines:
        return text
    return "\n".join([text, *notes([f"({', '.join(gone)}: left out, the terminal is narrow)"])])


def notes(lines: list[str], indent: str = "  ") -> list[str]:
    """Wrap sentences to the terminal, with a hanging indent."""
    if (room := width()) is None:
        return lines
    return [textwrap.fill(line, room, subsequent_indent=indent, break_on_hyphens=False) for line in lines]


def _natural(table: list[tuple[str, ...]], kept: list[int]) -> int:
    return sum(max(len(line[i]) for line in table) for i in kept) + GAP * (len(kept) - 1)


def _rich(header: tuple[str, ...], lines: list[tuple[str, ...]], room: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")
    for i, name in enumerate(header):
        numeric = i > 0 and lines and all(NUMBER.match(line[i]) for line in lines)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        drawn.add_row(*(Text(cell, "bold red" if RED.search(cell) else "") for cell in line))
    colours = {"force_terminal": sys.stdout.isatty(), "color_system": "auto" if sys.stdout.isatty() else None}
    console = Console(file=io.StringIO(), width=room, **colours)
    console.print(drawn)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n"))


def _plain(rows: list[tuple[str, ...]]) -> str:
    """Format without rich: pad columns to their widest cell and underline the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [(" " * GAP).join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
