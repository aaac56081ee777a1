"""estimate the time of GPU launches from their compiled code

Measures nothing. Compiles launches of the shipped cases, executes three CTAs of each on the emulator, and times their
instructions by a scoreboard. retro_bench/static/estimate.py lists its simplifications. Records have the mode "model".
"""

import argparse
import json
import sys
from pathlib import Path

from ..report.tables import align
from . import calls, exits, options

#: of the calibration's rows nine tenths are nearer to their published times (16.1% is the 90th percentile)
SPREAD = 0.18
#: least part of its published times that plain flash attention's estimates are: attention comes out too fast
ATTENTION, ATTENTIONS = 0.76, ("chunked_cross_attention", "relative_attention")
HEADER = ("launch", "case", "type", "tile", "waves", "us", "low", "high", "bound", "next")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_executed(parser)
    add = parser.add_argument
    add("--machine", default="H200", metavar="GPU", help="A100, H100, H200 or another of `estimate.MACHINES`")
    add("--calibration", action="store_true", help="estimate published kernels; takes minutes")
    add("--json", type=Path, metavar="FILE", help="append the predictions to this file")


def execute(arguments: argparse.Namespace) -> int:
    calls.refuse_interpreter()
    from ..emulate.parse import PtxError
    from ..static import estimate, table

    machine = options.machine(arguments)
    if arguments.call:
        return _called(arguments.call, machine)
    if arguments.calibration:
        return _calibration()
    plan = table.plan([machine.arch], options.parts(arguments))
    plan.cuda.clear()
    plan.triton[:] = [one for one in plan.triton if options.launch_matches(one, arguments)]
    if not plan.triton:
        raise exits.UsageError("no shipped launch has such a kernel, case and type")
    lines, totals = [HEADER], {}
    for one, row in zip(plan.triton, table.rows(plan, None, 1), strict=True):
        name, case, _ = one.case.split(":")
        try:
            found = estimate.estimate(one.launch, row["static"], machine)
        except PtxError as error:
            print(f"{one.id}: not emulated: {error}", file=sys.stderr)
            continue
        second, share = sorted(found.shares.items(), key=lambda item: -item[1])[1]
        times = (f"{1e6 * time:.1f}" for time in (found.seconds, *interval(one.op, found.seconds)))
        numbers = (f"{found.waves:.2f}", *times, found.bound, f"{second} {share:.0%}")
        lines.append((name, case, one.dtype, row["static"]["config"] or "-", *numbers))
        totals.setdefault((one.op, case), []).append(found.seconds)
        if arguments.json:
            _write(arguments.json, one, machine, found)
        _dot()
    _shown(lines)
    for (op, case), seconds in totals.items():
        print(f"{op}, {case}: {1e6 * sum(seconds):.1f} us in {len(seconds)} launches")
    within = f"nine tenths of the calibration's rows are within {SPREAD:.0%}"
    print(f"estimated for one {machine.name}, not measured; {within}")
    return exits.OK


def _dot() -> None:
    """Show that a row is done."""
    print(".", end="", file=sys.stderr, flush=True)


def _shown(lines: list[tuple[str, ...]]) -> None:
    print(file=sys.stderr)
    print(align(lines))


def _calibration() -> int:
    """Print published times beside their estimates, and the errors."""
    from ..static.calibration import judge, published

    rows, lines = [], [("kernel", "GPU", "type", "sizes", "us", "estimated", "bound", "")]
    for one in judge.judged():
        rows.append(one)
        sizes = "x".join(map(str, one.row.sizes))
        held = "held back" if one.held_back else ""
        measured, ratio = f"{one.row.microseconds:g}", f"{one.ratio:.2f}x"
        lines.append((one.row.kernel, one.row.machine, one.row.dtype, sizes, measured, ratio, one.bound, held))
        _dot()
    _shown(lines)
    parts = {"all": rows, "fitted": [r for r in rows if not r.held_back], "held back": [r for r in rows if r.held_back]}
    for name, part in parts.items():
        median, ninth = judge.errors(row.ratio for row in part)
        print(f"{name}, {len(part)} rows: median error {median:.1%}, 90th percentile {ninth:.1%}")
    lines, ratios = [("product", "tile estimated fastest", "of", "slower than the fastest")], []
    for sizes, measured in published.TILED.items():
        one = judge.chosen(sizes, measured)
        ratios += one.ratios
        tile = "{}x{}x{} w{} s{}".format(*one.tile)
        lines.append(("x".join(map(str, sizes)), tile, str(len(measured)), f"{one.slower:.2f}x"))
        _dot()
    _shown(lines)
    median, ninth = judge.errors(ratios)
    print(f"their tiles, {len(ratios)} rows: median error {median:.1%}, 90th percentile {ninth:.1%}")
    return exits.OK


def interval(op: str, seconds: float) -> tuple[float, float]:
    """Return the least and the most seconds that the calibration lets one expect of an estimate."""
    return seconds / (1 + SPREAD), seconds / (ATTENTION if op in ATTENTIONS else 1 - SPREAD)


def _write(path: Path, one, machine, found) -> None:
    row = {
        "mode": "model",
        "id": one.id,
        "machine": machine.name,
        "fingerprint": one.fingerprint,
        "predicted_us": round(1e6 * found.seconds, 2),
        "interval_us": [round(1e6 * time, 2) for time in interval(one.op, found.seconds)],
        "bound": found.bound,
        "shares": found.shares,
        "waves": round(found.waves, 3),
        "hbm_bytes": found.hbm_bytes,
        "l2_bytes": found.l2_bytes,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _called(call: str, machine) -> int:
    """Print the estimates of the launches of FILE.py::FUNCTION."""
    total = 0.0
    for launch in calls.launches(call, machine.arch, counts=False):
        found = launch.estimate(machine.name)
        total += found.seconds
        print(f"{calls.titled(launch)}: {1e6 * found.seconds:.1f} us, {found.bound}")
    print(f"{1e6 * total:.1f} us; predicted for one {machine.name}, not measured")
    return exits.OK
