"""Self-contained page of records: the verdict as in a terminal, and tables that sort and filter."""

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ..records.record import latest as latest_of
from . import summary, terminal

HERE = Path(__file__).resolve().parent
COLOURS = re.compile(r"\x1b\[[\d;]*m")  # a terminal's colours
ALARM = "background: rgba(var(--bad), 0.6); font-weight: 700"


def page(records: list[dict[str, Any]], requested: Iterable[str] = ()) -> str:
    """Return the page of the last record of every id. It begins with the ids that were requested and have no record."""
    latest = list(latest_of(records).values())
    rows = [row for row in summary.rows(latest) if row.seconds is not None]
    compiled, others = ([r for r in latest if bool(r["static"]) == static] for static in (True, False))
    said = terminal.verdict(others, requested, None, "the run ended early") if others or requested else ""
    said = "\n".join([said, "", *summary.machine(latest), *terminal.problems(latest)]).strip()
    parts = [f"<pre>{escape(COLOURS.sub('', said))}</pre>"]
    parts += [f"<p class=wrong>{escape(wrong)}</p>"] if (wrong := summary.beyond(latest)) else []
    if rows:
        parts.append(_section("Measurements", "all", _timed(rows)))
    elif not compiled:
        parts.append("<p>nothing was timed</p>")
    parts += [_section("Compiled kernels", "compiled", _compiled(compiled))] if compiled else []
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += '<meta name="color-scheme" content="light dark"><title>retro_kernels: measurements</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{style}</style></head>'
        f"<body><h1>retro_kernels</h1>{''.join(parts)}<script>{script}</script></body></html>\n"
    )


def _section(title: str, anchor: str, content: str) -> str:
    return f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{content}</section>'


def _table(name: str, columns: tuple[str, ...], lines: list[list[tuple[str, Any, str]]]) -> str:
    """Write a table that sorts and filters. `lines`: of (text, value to sort by, style)."""
    numeric = [any(isinstance(line[i][1], (int, float)) for line in lines) for i in range(len(columns))]
    kind = [" class=number" if n else "" for n in numeric]
    named = zip(columns, kind, strict=True)
    head = "".join(f'<th scope="col"{k}><button type="button">{escape(c)}</button></th>' for c, k in named)
    body = []
    for line in lines:
        cells = "".join(
            f'<td{k} data-value="{"" if value is None else escape(str(value))}"'
            f"{f' style={chr(34)}{style}{chr(34)}' if style else ''}>{escape(text)}</td>"
            for (text, value, style), k in zip(line, kind, strict=True)
        )
        body.append(f"<tr>{cells}</tr>")
    search = f'<input type="search" data-table="{name}" placeholder="words, -words" aria-label="filter the table">'
    tools = f'<div class=tools>{search}<span id="{name}-count">{len(lines)} of {len(lines)}</span></div>'
    parts = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'{tools}<div class=scroll><table class=sortable id="{name}">{parts}</table></div>'


def _timed(rows: list[summary.ReportRow]) -> str:
    lines = []
    for row in rows:
        record = row.record
        case, dtype, mode, backend, *shown = summary.cells(row)
        size, margin = record["memory"]["peak_extra_bytes"] if record["memory"] else None, summary.margin(record)
        values = [row.seconds, row.speedup, row.rival_speedup, row.fraction, size, margin]
        styles = ["", "", "", ALARM * ((row.fraction or 0) > 1), "", ALARM * ((margin or 0) > 1)]
        names = [(text, text, "") for text in (record["op"], case, dtype, mode, backend)]
        lines.append([*names, *zip(shown, values, styles, strict=True)])
    return _table("timed", ("op", *summary.columns(row.record for row in rows)), lines)


def _compiled(records: list[dict[str, Any]]) -> str:
    stack = summary.STATIC_COLUMNS.index("stack")
    lines = []
    for record in records:
        cells = [(text, _number(text), "") for text in summary.static_cells(record)]
        if record["static"]["stack_bytes"]:
            cells[stack] = (*cells[stack][:2], ALARM)
        lines.append(cells)
    return _table("compiled-kernels", summary.STATIC_COLUMNS, lines)


def _number(text: str) -> Any:
    try:
        return None if text == "-" else float(text)
    except ValueError:
        return text
