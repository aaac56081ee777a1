"""estimate the time of GPU launches from their compiled code

Measures nothing. Compiles launches of the shipped cases, executes three CTAs of each on the emulator, and times their
instructions by a scoreboard. ptx_emulator/estimate/model.py lists its simplifications. Records have the mode "model".
`ptx-emulator estimate FILE.py::FUNCTION` estimates the launches of any function.
"""

import argparse
import sys
from pathlib import Path

from ..records import record
from ..report.tables import align, notes
from . import emulator, exits, options, progress

#: least part of its published times that plain flash attention's estimates are: attention comes out too fast
ATTENTION, ATTENTIONS = 0.76, ("chunked_cross_attention", "relative_attention")
#: columns that a narrow terminal drops, in this order
DROP = ("next", "waves", "tile", "type", "bound")
HEADER = ("launch", "case", "type", "tile", "waves", "us", "low", "high", "bound", "next")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_executed(parser)
    add = parser.add_argument
    add("--machine", default="H200", metavar="GPU", help="A100, H100, H200 or another that has a data sheet")
    add("--json", type=options.output, metavar="FILE", help="append the predictions to this file")


def execute(arguments: argparse.Namespace) -> int:
    emulator.required()
    from ptx_emulator import PtxError
    from ptx_emulator.estimate import estimate
    from ptx_emulator.estimate.calibration.judge import SPREAD

    from ..static import table

    machine = options.machine(arguments)
    selection = table.select([machine.arch], options.parts(arguments))
    selection.cuda.clear()
    selection.triton[:] = [one for one in selection.triton if options.launch_matches(one, arguments)]
    if not selection.triton:
        raise exits.UsageError("no shipped launch has such a kernel, case and type")
    lines, totals, shown = [HEADER], {}, progress.Progress(len(selection))
    for one, row in zip(selection.triton, table.rows(selection, None, 1), strict=True):
        shown.step(one.id)
        name, case, _ = one.case.split(":")
        try:
            found = estimate(one.launch, machine, row["static"])
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
    print(align(lines, DROP))
    for (op, case), seconds in totals.items():
        print(f"{op}, {case}: {1e6 * sum(seconds):.1f} us in {len(seconds)} launches")
    within = f"nine tenths of the calibration's rows are within {SPREAD:.0%}"
    said = [f"estimated for one {machine.name}, not measured; {within}"]
    if left := len(selection) + 1 - len(lines):
        said.append(f"{left} of {len(selection)} launches were not estimated")
    print("\n".join(notes(said)))
    return exits.OK if totals else exits.NOTHING_MEASURED


def interval(op: str, seconds: float) -> tuple[float, float]:
    """Return the least and the most seconds that the calibration lets one expect of an estimate."""
    from ptx_emulator.estimate.calibration.judge import SPREAD

    return seconds / (1 + SPREAD), seconds / (ATTENTION if op in ATTENTIONS else 1 - SPREAD)


def _write(path: Path, one, machine, found) -> None:
    row = {
        "mode": "model",
        "id": one.id,
        "machine": machine.name,
        "fingerprint": one.fingerprint,
        "predicted_us": round(1e6 * found.seconds, 2),
        "interval_us": [round(1e6 * time, 2) for time in interval(one.op, found.seconds)],
    }
    record.append(path, row | {name: value for name, value in vars(found).items() if name != "seconds"})
