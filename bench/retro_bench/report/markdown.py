"""Markdown for a pull-request comment. It shows 20 rows and folds the others."""

from collections.abc import Iterable
from typing import Any

from ..records import record
from . import summary

#: first line of a comment, by which a workflow finds the comment to update
MARKER = "<!-- retro_kernels bench -->"
VISIBLE_ROWS = 20
HEADER = """\
| case | type | mode | backend | {} | vs eager | vs best baseline | roofline | error/limit |
|---|---|---|---|--:|--:|--:|--:|--:|"""


def table(records: list[dict[str, Any]], requested: Iterable[str] = ()) -> str:
    """Return the missing cases and a table of the ops of `records`, the slowest against their rivals first."""
    timed = [row for row in summary.rows(records) if row.seconds is not None]
    timed.sort(key=lambda row: row.rival_speedup if row.rival_speedup is not None else float("inf"))
    lacking = summary.left_out(requested, records)
    lines = [f"**{summary.INCOMPLETE}**", *(f"- {escape(one)}" for one in lacking), ""]
    lines = [*(lines if lacking else []), *(f"{line}  " for line in summary.machine(records))]
    bad = [r for r in records if r["status"] in record.FAILED]
    lines += [f"- {wrong}"] if (wrong := summary.beyond(records)) else []
    lines += [f"- **{r['status']}** `{r['id']}`: {escape(r['reason'])}" for r in bad]
    compiled, tables = [r for r in records if r["static"]], []
    if timed or not compiled:
        cells = [(row.record["op"], summary.cells(row)) for row in timed]
        # memory is left out: a comment is narrow
        rows = [line((f"{op}/{case}", *middle, margin)) for op, (case, *middle, _, margin) in cells]
        tables.append(folded(HEADER.format(summary.statistic(records)), rows))
    if compiled:
        tables.append(folded(header(summary.STATIC_COLUMNS), [line(summary.static_cells(r)) for r in compiled]))
    return "\n".join([MARKER, *lines, *(text for table in tables for text in ("", *table))]) + "\n"


def header(columns: tuple[str, ...]) -> str:
    return line(columns) + "\n|" + "---|" * len(columns)


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"


def folded(header: str, lines: list[str]) -> list[str]:
    """Return the header with the first lines, and the others under a fold."""
    if not lines:
        return ["Nothing to show."]
    shown, hidden = lines[:VISIBLE_ROWS], lines[VISIBLE_ROWS:]
    if not hidden:
        return [header, *shown]
    fold = ["", f"<details><summary>{len(hidden)} more</summary>", "", header, *hidden, "", "</details>"]
    return [header, *shown, *fold]


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
