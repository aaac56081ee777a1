"""One self-contained HTML page: table, roofline scatter, ratio bars, history."""

from __future__ import annotations

from html import escape
from typing import Any

from .. import record as records_module
from . import summary, svg

STYLE = """body{font-family:sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
.bad{color:#a40000}"""


def page(records: list[dict[str, Any]]) -> str:
    """All plots that the records can fill; the table shows the last record of every id."""
    latest = list(records_module.latest(records).values())
    rows = [row for row in summary.rows(latest) if row.seconds is not None]
    sections = [
        ("Kernels", _timed(rows)),
        ("Compiled kernels", _compiled([r for r in latest if r["static"]])),
        ("Failures", _failures(latest)),
        ("Roofline", svg.roofline(scatter(rows), roofs(latest))),
        ("Speed-up over the fastest baseline that computes the same", svg.bars(ratios(rows))),
        ("History", svg.lines(history(records))),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections if content)
    said = [*summary.machine(latest), *filter(None, [summary.beyond(latest)])]
    head = "".join(f"<p>{escape(line)}</p>" for line in said)
    return f'<!doctype html><meta charset="utf-8"><title>retro_kernels: benchmarks</title><style>{STYLE}</style><h1>retro_kernels</h1>{head}{body}\n'


def scatter(rows: list[summary.Row]) -> list[tuple[float, float, str, str]]:
    """(FLOPs a byte, FLOP/s, operator, label) of every timed kernel whose work is known."""
    points = []
    for row in rows:
        work = row.record["work"]
        if not work or not work["bytes"] or not work["flops"]:
            continue
        points.append((work["flops"] / work["bytes"], work["flops"] / row.seconds, row.record["kernel"], row.record["id"]))
    return points


def roofs(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(type, bytes/s, FLOP/s) of the last ceilings that were measured."""
    ceilings = next((r["ceilings"] for r in reversed(records) if r["ceilings"]), None)
    if ceilings is None:
        return []
    return [(dtype, ceilings["bytes_per_s"], rate) for dtype, rate in ceilings["flops_per_s"].items() if rate]


def ratios(rows: list[summary.Row]) -> list[tuple[str, float, str]]:
    """(label, speed-up over the fastest same-function baseline, operator)."""
    return [
        (f"{r.record['case']['name']} {r.record['dtype']} {r.record['mode']} {r.record['backend']}", r.rival_speedup, r.record["kernel"])
        for r in rows
        if r.rival_speedup is not None
    ]


def history(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """id -> its times in the order they were recorded, kernels only."""
    series: dict[str, list[float]] = {}
    for row in summary.rows(records):
        if row.seconds is not None:
            series.setdefault(row.record["id"], []).append(row.seconds)
    return series


def _table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in (head, *body)) + "</table>"


def _timed(rows: list[summary.Row]) -> str:
    lines = [(row.record["kernel"], *summary.cells(row)) for row in rows]
    return _table(("kernel", *summary.COLUMNS), lines) if rows else "<p>no kernel was timed</p>"


def _compiled(records: list[dict[str, Any]]) -> str:
    return _table(summary.STATIC_COLUMNS, [summary.static_cells(r) for r in records]) if records else ""


def _failures(records: list[dict[str, Any]]) -> str:
    bad = [r for r in records if r["status"] in ("numerics_fail", "error", "oom")]
    items = "".join(f'<li class="bad">{escape(r["status"])}: {escape(r["id"])}: {escape(r["reason"])}</li>' for r in bad)
    return f"<ul>{items}</ul>" if items else ""
