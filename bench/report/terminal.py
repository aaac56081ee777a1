"""Plain-text tables for a terminal."""

from __future__ import annotations

from typing import Any

from . import summary


def times(records: list[dict[str, Any]]) -> str:
    """One table an operator, then what did not run and why."""
    parts = summary.machine(records)
    for kernel in dict.fromkeys(record["kernel"] for record in records):
        rows = [row for row in summary.rows(records) if row.record["kernel"] == kernel and row.seconds is not None]
        if rows:
            parts += ["", kernel, align([summary.COLUMNS, *map(summary.cells, rows)])]
    wrong = summary.beyond(records)
    return "\n".join([*parts, *(["", wrong] if wrong else []), *_problems(records)])


def checks(records: list[dict[str, Any]]) -> str:
    """One line a contender and type with its worst error, then what failed or did not run."""
    table = [("kernel", "contender", "case", "type", "status", "error/limit", "worst", "checked")]
    for record in records:
        if record["numerics"] is None:
            continue
        tensors = record["numerics"]["tensors"]
        worst = max(tensors, key=lambda name: _relative(tensors[name]))
        cells = (record["kernel"], record["backend"], record["case"]["name"], record["dtype"], record["status"])
        table.append((*cells, summary.number(summary.margin(record)), worst, record["numerics"]["checked"]))
    return "\n".join([*summary.machine(records), "", align(table), *_problems(records)])


def full(records: list[dict[str, Any]]) -> str:
    """Whatever the records hold: times, checks, compiled kernels."""
    compiled = [r for r in records if r["static"]]
    checked = [r for r in records if r["mode"] == "check"]
    timed = [r for r in records if r["mode"] not in ("check", "static")]
    parts = [(times, timed), (checks, checked), (static, compiled)]
    return "\n\n".join(draw(some) for draw, some in parts if some)


def static(records: list[dict[str, Any]]) -> str:
    """One line a compiled kernel."""
    return align([summary.STATIC_COLUMNS, *map(summary.static_cells, records)])


def _relative(tensor: dict[str, Any]) -> float:
    return float("inf") if tensor["frobenius"] is None else tensor["frobenius"] / tensor["limit"]


def _problems(records: list[dict[str, Any]]) -> list[str]:
    """Failures one a line; what can't run here, folded by reason."""
    lines = []
    for (status, reason), group in summary.problems(records).items():
        if status == "unsupported":
            who = ", ".join(dict.fromkeys(f"{r['kernel']}/{r['backend']}" for r in group))
            lines.append(f"not run: {who}: {reason}")
        else:
            lines += [f"{status.upper()}: {r['id']}: {reason}" for r in group]
    return ["", *lines] if lines else []


def align(table: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest cell, two spaces apart, the first row underlined."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
