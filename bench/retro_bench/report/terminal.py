"""Tables of records for a terminal: times, checks, compiled kernels, and the cases that did not run."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import summary
from .tables import align, notes

#: columns that a narrow terminal drops, in this order
DROP_TIMES = ("MB extra", "error/limit", "vs eager", "roofline", "mode")
DROP_CHECKS = ("checked", "worst", "error/limit")
DROP_STATIC = ("loop cycles >=", "config", "loop slots", "async", "shared", "tensor", "CTAs/SM", "sm", "CTAs/CU")


def times(records: list[dict[str, Any]]) -> str:
    """Format a table for each operator, then the cases that did not run."""
    parts = notes(summary.machine(records))
    for op in dict.fromkeys(record["op"] for record in records):
        rows = [row for row in summary.rows(records) if row.record["op"] == op and row.seconds is not None]
        if rows:
            parts += ["", op, align([summary.columns(records), *map(summary.cells, rows)], DROP_TIMES)]
    wrong = summary.beyond(records)
    return "\n".join([*parts, *notes(["", wrong] if wrong else []), *problems(records)])


def verdict(
    records: list[dict[str, Any]],
    requested: Iterable[str],
    path: Path | None,
    why: str = "the time limit was reached",
    remedy: str = "",
) -> str:
    """List the cases that were left out, and answer the questions of a first-time user."""
    lacking = summary.left_out(requested, records)
    parts = ["", *notes([f"Left out, because {why}:", *lacking])] if lacking else []
    kernels = [r for r in records if r["role"] != "baseline" and r["status"] != "unsupported"]
    wrong = [r["id"] for r in records if r["status"] in ("numerics_fail", "error")]
    checked = {r["id"].rpartition("/")[0] for r in kernels}
    bad = {r["id"].rpartition("/")[0] for r in kernels if r["status"] != "ok"}
    ops = len({r["op"] for r in kernels})
    answer = "no" if wrong else "yes" if checked else "nothing was checked"
    passed = f"{len(checked - bad)} of {len(checked)} checks of {ops} ops pass against the float64 reference"
    parts += ["", *notes([f"Right?    {answer}: {passed}"])]
    if wrong:
        parts += notes([f"Wrong:    {', '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}"])
    if any(r["mode"] != "check" for r in records):
        parts += _fast(records)
    left = f"cases of {len(lacking)} ops, listed above{remedy}" if lacking else "nothing"
    return "\n".join([*parts, *notes([f"Missing?  {left}"]), *([f"Records:  {path}"] if path else [])])


def _fast(records: list[dict[str, Any]]) -> list[str]:
    """Say how fast the kernels are, for each type in which the device computes."""
    rows = [row for row in summary.rows(records) if row.seconds is not None]
    compared = [row for row in rows if row.rival]
    if not compared:
        return [f"Fast?     {len(rows)} times, without a baseline to compare with"]
    types = list(dict.fromkeys(row.record["dtype"] for row in compared if summary.native(row.record)))
    rivals = ", ".join(dict.fromkeys(row.rival for row in compared))
    said = notes([f"Fast?     times the speed of the fastest baseline of the same run ({rivals})"])
    table = [("op", *(name for dtype in types for name in (f"{dtype} mean", "worst")))]
    for op in [*dict.fromkeys(row.record["op"] for row in rows), "all"]:
        cells = []
        for dtype in types:
            own = (r for r in compared if r.record["dtype"] == dtype and op in ("all", r.record["op"]))
            ratios = [row.rival_speedup for row in own]
            mean, worst = (statistics.geometric_mean(ratios), min(ratios)) if ratios else (None, None)
            cells += [summary.ratio(mean), summary.ratio(worst)]
        table.append((op, *cells))
    said += [align(table)] if types else []
    emulated = ", ".join(dict.fromkeys(r.record["dtype"] for r in compared if not summary.native(r.record)))
    why = "does not count here, because torch emulates it on this processor"
    return said + (notes([f"          {emulated} {why}"]) if emulated else [])


def checks(records: list[dict[str, Any]]) -> str:
    """Format a line for each contender and type with its worst error, then the failures."""
    table = [("op", "contender", "case", "type", "status", "error/limit", "worst", "checked")]
    for record in records:
        if record["numerics"] is None:
            continue
        tensors = record["numerics"]["tensors"]
        worst = max(tensors, key=lambda name: summary.relative(tensors[name])) if tensors else "-"
        cells = (record["op"], record["backend"], record["case"]["name"], record["dtype"], record["status"])
        table.append((*cells, summary.number(summary.margin(record)), worst, record["numerics"]["checked"]))
    return "\n".join([*notes(summary.machine(records)), "", align(table, DROP_CHECKS), *problems(records)])


def full(records: list[dict[str, Any]], requested: Iterable[str] = ()) -> str:
    """Write the missing cases and every table that the records fill: times, checks, compiled kernels."""
    lacking = summary.left_out(requested, records)
    first = ["\n".join(notes([summary.INCOMPLETE, *lacking]))] if lacking else []
    compiled = [r for r in records if r["static"]]
    checked = [r for r in records if r["mode"] == "check"]
    timed = [r for r in records if r["mode"] not in ("check", "static")]
    parts = [(times, timed), (checks, checked), (static, compiled)]
    return "\n\n".join([*first, *(draw(some) for draw, some in parts if some)])


def static(records: list[dict[str, Any]]) -> str:
    """Format a line for each compiled kernel, with a table of its own for AMD's processors."""
    amd = [record for record in records if summary.for_amd(record)]
    nvidia = [record for record in records if not summary.for_amd(record)]
    tables = [(summary.STATIC_COLUMNS, summary.static_cells, nvidia), (summary.AMD_COLUMNS, summary.amd_cells, amd)]
    return "\n\n".join(align([names, *map(cells, some)], DROP_STATIC) for names, cells, some in tables if some)


def problems(records: list[dict[str, Any]]) -> list[str]:
    """Format a line for each failure, and one for each reason of cases that can't run here."""
    groups, lines = {}, []
    for record in records:
        if record["status"] != "ok":
            groups.setdefault((record["status"], record["reason"]), []).append(record)
    for (status, reason), group in groups.items():
        if status == "unsupported":
            who = ", ".join(dict.fromkeys(f"{r['op']}/{r['backend']}" for r in group))
            lines.append(f"not run: {who}: {reason}")
        else:
            lines += [f"{status.upper()}: {r['id']}: {reason}" for r in group]
    return ["", *notes(lines)] if lines else []
