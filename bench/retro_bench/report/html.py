"""Self-contained page of records: verdict, a table that sorts and filters, and a section for each op."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ..records import record as records_module
from . import figures, panels, summary

HERE = Path(__file__).resolve().parent
ALARM = "background: rgba(var(--bad), 0.6); font-weight: 700"


def page(records: list[dict[str, Any]], requested: Iterable[str] = ()) -> str:
    """Return the page of the last record of every id. It begins with the ids that were requested and have no record.
    Without matplotlib it has no pictures and says so.
    """
    latest = list(records_module.latest(records).values())
    rows = [row for row in summary.rows(latest) if row.seconds is not None]
    compiled = [r for r in latest if r["static"]]
    wrong = summary.beyond(latest)
    lacking = summary.left_out(requested, latest)
    parts = [_left_out(lacking)] if lacking else []
    parts += [_verdict(latest, rows, lacking)]
    parts += [f"<p class=machine>{escape(line)}</p>" for line in summary.machine(latest)]
    parts += [f"<p class=wrong>{escape(wrong)}</p>"] if wrong else []
    parts.append(_failures(latest))
    if rows:
        parts.append(_section("Measurements", "all", _timed(rows)))
    elif not compiled:
        parts.append("<p>nothing was timed</p>")
    parts += _pictures(rows, latest)
    parts += [_section("Compiled kernels", "compiled", _compiled(compiled))] if compiled else []
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += '<meta name="color-scheme" content="light dark"><title>retro_kernels: measurements</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{style}</style></head>'
        f"<body><h1>retro_kernels</h1>{''.join(parts)}<script>{script}</script></body></html>\n"
    )


def _left_out(lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f'<div id="missing"><p class=wrong>This run is not complete. It was to measure also:</p><ul>{items}</ul></div>'
    )


def _verdict(latest: list[dict[str, Any]], rows: list[summary.ReportRow], lacking: list[str]) -> str:
    """Write the verdict, a line each: Right? Fast? Missing?"""
    kernels = [r for r in latest if r["role"] != "baseline" and r["mode"] != "static"]
    bad = [r for r in kernels if r["status"] in records_module.FAILED]
    passed = [r for r in kernels if r["status"] == "ok"]
    missing = [r for r in kernels if r["status"] == "unsupported"]
    yes = f"yes{', as far as it was checked' if lacking else ''}: {len(passed)} pass"
    right = f"<span class=bad>no: {len(bad)} of {len(kernels)} fail</span>" if bad else yes
    types = dict.fromkeys(row.record["dtype"] for row in rows if summary.native(row.record))
    best = {dtype: summary.headline(row for row in rows if row.record["dtype"] == dtype) for dtype in types}
    said = [
        f"{dtype}: {summary.ratio(found.mean)} the speed of the best baseline (geometric mean of {found.count}), "
        f"worst {summary.ratio(found.worst.rival_speedup)}"
        for dtype, found in best.items()
        if found
    ]
    untimed = len(passed) - sum(row.record["role"] != "baseline" for row in rows)
    lacks = [f"cases of {len(lacking)} ops, listed above"] * bool(lacking)
    lacks += [f"{len(missing)} not served"] * bool(missing) + [f"{untimed} not timed"] * (untimed > 0)
    fast = escape("; ".join(said)) or "not compared with a baseline" * bool(rows) or "not timed"
    lines = {"Right?": right if kernels else "not checked", "Fast?": fast, "Missing?": ", ".join(lacks) or "nothing"}
    items = "".join(f"<tr><th>{question}</th><td>{answer}</td></tr>" for question, answer in lines.items())
    return f'<table id="verdict">{items}</table>'


def _section(title: str, anchor: str, content: str) -> str:
    return f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{content}</section>'


def _failures(records: list[dict[str, Any]]) -> str:
    bad = [r for r in records if r["status"] in records_module.FAILED]
    items = "".join(f"<li class=bad>{escape(r['status'])}: {escape(r['id'])}: {escape(r['reason'])}</li>" for r in bad)
    return _section("Failures", "failures", f"<ul>{items}</ul>") if items else ""


def _pictures(rows: list[summary.ReportRow], latest: list[dict[str, Any]]) -> list[str]:
    """Return a section for each operator, with its roofline and bars."""
    ops: dict[str, list[summary.ReportRow]] = {}
    for row in rows:
        ops.setdefault(row.record["op"], []).append(row)
    try:
        return [_operator(op, own, latest) for op, own in ops.items()]
    except ImportError:
        return ["<p>The pictures need matplotlib (pip install matplotlib).</p>"]


def _operator(op: str, rows: list[summary.ReportRow], latest: list[dict[str, Any]]) -> str:
    drawn = [figures.svg(panels.roofline, rows, figures.roofs(latest))]
    compared = [row for row in rows if row.rival_speedup is not None]
    if compared:
        drawn.append(figures.svg(panels.bars, compared, height=figures.bar_height(compared)))
    return _section(op, op, "".join(f"<figure>{picture}</figure>" for picture in drawn))


def _table(name: str, columns: tuple[str, ...], lines: list[tuple[str, list[tuple[str, Any, str]]]]) -> str:
    """Write a table that sorts and filters. `lines`: (id, [(text, value to sort by, style)])."""
    numeric = [any(isinstance(line[i][1], (int, float)) for _, line in lines) for i in range(len(columns))]
    kind = [" class=number" if n else "" for n in numeric]
    named = zip(columns, kind, strict=True)
    head = "".join(f'<th scope="col"{k}><button type="button">{escape(c)}</button></th>' for c, k in named)
    body = []
    for identity, line in lines:
        cells = "".join(
            f'<td{k} data-value="{"" if value is None else escape(str(value))}"'
            f"{f' style={chr(34)}{style}{chr(34)}' if style else ''}>{escape(text)}</td>"
            for (text, value, style), k in zip(line, kind, strict=True)
        )
        body.append(f'<tr data-id="{escape(identity)}">{cells}</tr>')
    search = f'<input type="search" data-table="{name}" placeholder="words, -words" aria-label="filter the table">'
    tools = f'<div class=tools>{search}<span id="{name}-count">{len(lines)} of {len(lines)}</span></div>'
    parts = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'{tools}<div class=scroll><table class=sortable id="{name}">{parts}</table></div>'


def _timed(rows: list[summary.ReportRow]) -> str:
    lines = []
    for row in rows:
        record = row.record
        case, dtype, mode, backend, *shown = summary.cells(row)
        size = record["memory"]["peak_extra_bytes"] if record["memory"] else None
        values = [row.seconds, row.speedup, row.rival_speedup, row.fraction, size, row.margin]
        alarms = [False, False, False, (row.fraction or 0) > 1, False, (row.margin or 0) > 1]
        styles = [ALARM * alarm for alarm in alarms]
        names = [(text, text, "") for text in (record["op"], case, dtype, mode, backend)]
        lines.append((record["id"], [*names, *zip(shown, values, styles, strict=True)]))
    return _table("timed", ("op", *summary.columns(row.record for row in rows)), lines)


def _compiled(records: list[dict[str, Any]]) -> str:
    stack = summary.STATIC_COLUMNS.index("stack")
    lines = []
    for record in records:
        cells = [(text, _number(text), "") for text in summary.static_cells(record)]
        if record["static"]["stack_bytes"]:
            cells[stack] = (*cells[stack][:2], ALARM)
        lines.append((record["id"], cells))
    return _table("compiled-kernels", summary.STATIC_COLUMNS, lines)


def _number(text: str) -> Any:
    try:
        return None if text == "-" else float(text)
    except ValueError:
        return text
