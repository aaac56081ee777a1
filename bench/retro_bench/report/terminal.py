"""Tables of records for a terminal: times, checks, compiled kernels, and the cases that did not run."""

from typing import Any

from . import summary
from .tables import align, notes

#: columns that a narrow terminal drops, in this order
DROP_TIMES = ("MB extra", "error/limit", "vs eager", "roofline", "mode")
DROP_CHECKS = ("checked", "worst", "error/limit")
DROP_STATIC = ("loop cycles >=", "config", "loop slots", "async", "shared", "tensor", "CTAs/SM", "sm")


def times(records: list[dict[str, Any]]) -> str:
    """Format a table for each operator, then the cases that did not run."""
    parts = notes(summary.machine(records))
    for kernel in dict.fromkeys(record["kernel"] for record in records):
        rows = [row for row in summary.rows(records) if row.record["kernel"] == kernel and row.seconds is not None]
        if rows:
            parts += ["", kernel, align([summary.COLUMNS, *map(summary.cells, rows)], DROP_TIMES)]
    wrong = summary.beyond(records)
    return "\n".join([*parts, *notes(["", wrong] if wrong else []), *_problems(records)])


def checks(records: list[dict[str, Any]]) -> str:
    """Format a line for each contender and type with its worst error, then the failures."""
    table = [("kernel", "contender", "case", "type", "status", "error/limit", "worst", "checked")]
    for record in records:
        if record["numerics"] is None:
            continue
        tensors = record["numerics"]["tensors"]
        worst = max(tensors, key=lambda name: summary.relative(tensors[name])) if tensors else "-"
        cells = (record["kernel"], record["backend"], record["case"]["name"], record["dtype"], record["status"])
        table.append((*cells, summary.number(summary.margin(record)), worst, record["numerics"]["checked"]))
    return "\n".join([*notes(summary.machine(records)), "", align(table, DROP_CHECKS), *_problems(records)])


def full(records: list[dict[str, Any]]) -> str:
    """Write every table that the records fill: times, checks, compiled kernels."""
    compiled = [r for r in records if r["static"]]
    checked = [r for r in records if r["mode"] == "check"]
    timed = [r for r in records if r["mode"] not in ("check", "static")]
    parts = [(times, timed), (checks, checked), (static, compiled)]
    return "\n\n".join(draw(some) for draw, some in parts if some)


def static(records: list[dict[str, Any]]) -> str:
    """Format a line for each compiled kernel."""
    return align([summary.STATIC_COLUMNS, *map(summary.static_cells, records)], DROP_STATIC)


def _problems(records: list[dict[str, Any]]) -> list[str]:
    """Format a line for each failure, and one for each reason of cases that can't run here."""
    groups, lines = {}, []
    for record in records:
        if record["status"] != "ok":
            groups.setdefault((record["status"], record["reason"]), []).append(record)
    for (status, reason), group in groups.items():
        if status == "unsupported":
            who = ", ".join(dict.fromkeys(f"{r['kernel']}/{r['backend']}" for r in group))
            lines.append(f"not run: {who}: {reason}")
        else:
            lines += [f"{status.upper()}: {r['id']}: {reason}" for r in group]
    return ["", *notes(lines)] if lines else []
