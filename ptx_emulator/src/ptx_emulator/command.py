"""`ptx-emulator run|estimate FILE.py::FUNCTION`: the Triton launches of a function, executed or timed without a GPU."""

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

from .machines import DEVICES, MACHINES
from .parse import PtxError
from .program import EmulationError

OK, FAULT, USAGE = 0, 2, 4  # exit codes
LINES = 12  # hot lines of source that are shown


class UsageError(Exception):
    """Error: a command line that cannot be served."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="ptx-emulator", description="Execute Triton kernels without a GPU.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    codes = "Exit codes: 0 ok, 2 a kernel has a fault, 4 usage."
    run = commands.add_parser("run", help="execute launches with checks and counters", epilog=codes)
    run.add_argument("call", metavar="FILE.py::FUNCTION", help="execute the launches of this function")
    run.add_argument("--arch", type=int, choices=DEVICES, default=90, help="compile for this architecture (default 90)")
    run.set_defaults(execute=_run)
    model = commands.add_parser("estimate", help="estimate the time of launches", epilog=codes)
    model.add_argument("call", nargs="?", metavar="FILE.py::FUNCTION", help="estimate the launches of this function")
    text = f"on one of {', '.join(MACHINES)} (default H200)"
    model.add_argument("--machine", default="H200", choices=MACHINES, metavar="GPU", help=text)
    model.add_argument("--calibration", action="store_true", help="estimate published kernels; takes minutes")
    model.set_defaults(execute=_estimate)
    return top


def main(argv: list[str] | None = None) -> int:
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:
        return USAGE if stop.code else OK
    try:
        arguments.execute(arguments)
    except EmulationError as error:
        print(error)
        return FAULT
    except (UsageError, PtxError) as error:
        print(f"ptx-emulator: {error}", file=sys.stderr)
        return USAGE
    return OK


def launches(target: str, arch: int) -> list:
    """Call FUNCTION(), whose tensors may be on "cuda" or on the CPU, and return a list of `Execution`.

    Raises:
        UsageError: the file or function does not exist, or it launches nothing. EmulationError, PtxError: from a
        kernel.
    """
    from .context import gpu

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")
    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name or not path.is_file():
        raise UsageError(f"{target}: expected FILE.py::FUNCTION with a file that exists")
    with gpu(arch, cuda=True) as log, mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]):
        function = runpy.run_path(str(path)).get(name)
        if not callable(function):
            raise UsageError(f"{target}: {path.name} has no function {name}")
        function()
    if not log.launches:
        raise UsageError(f"{target}: the call launched no Triton kernel")
    return log.launches


def _run(arguments: argparse.Namespace) -> None:
    executed = launches(arguments.call, arguments.arch)
    for launch in executed:
        print(titled(launch))
        for note in launch.notes:
            print(f"  note: {note}")
        print(drawn(launch.counters(), launch.lines()[:LINES], "the grid"), flush=True)
    print(f"{len(executed)} launches: nothing wrong")


def titled(launch) -> str:
    """Name a launch in one line."""
    chosen = f", {launch.configuration}" if launch.configuration else ""
    return f"{launch.name}, sm_{launch.arch}, grid {launch.grid}, {launch.options['num_warps']} warps{chosen}"


def drawn(metrics: dict, lines: list, of: str = "a CTA") -> str:
    """Format counters as sentences, then the hottest lines of source."""
    kinds = sorted(metrics["instruction_mix"].items(), key=lambda item: -item[1])
    mix = ", ".join(f"{kind} {count}" for kind, count in kinds)
    table = [
        f"  {metrics['emulated_instructions']} instructions of {of}, for all its warps at once: {mix}",
        f"  {metrics['barriers']} barriers; {metrics['global_bytes'] / 1024:.0f} KiB in sectors of global memory",
        f"  sectors per request {_number(metrics['sectors_per_request'])}; of the fewest possible: sectors "
        f"{_number(metrics['sectors_over_fewest'])}x, shared wavefronts {_number(metrics['wavefronts_over_fewest'])}x",
        f"  {'line':<32} instructions  requests  sectors or wavefronts  fewest",
    ]
    for line in lines:
        counts = f"{line.requests:>8}  {line.units:>21}  {line.fewest:>6}"
        table.append(f"  {line.line:<32} {line.executed:>12}  {counts}")
    return "\n".join([*table, ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _estimate(arguments: argparse.Namespace) -> None:
    if arguments.calibration:
        return _calibration()
    if arguments.call is None:
        raise UsageError("estimate: expected FILE.py::FUNCTION or --calibration")
    total = 0.0
    for launch in launches(arguments.call, MACHINES[arguments.machine].arch):
        found = launch.estimate(arguments.machine)
        total += found.seconds
        print(f"{titled(launch)}: {1e6 * found.seconds:.1f} us, {found.bound}")
    print(f"{1e6 * total:.1f} us; estimated for one {arguments.machine}, not measured")


def _calibration() -> None:
    """Print published times with their estimates over the measured times, and the errors."""
    from .estimate.calibration import judge

    held, parts = judge.held_back(), {"all": [], "fitted": [], "held back": []}
    for number, one in enumerate(judge.judged(judge.ROWS)):
        part = "held back" if number in held else "fitted"
        print(f"{one.row}: {one.ratio:.2f}x, {one.bound}, {part}", flush=True)
        parts["all"].append(one)
        parts[part].append(one)
    parts["their tiles"] = []
    for _, rows in itertools.groupby(judge.TILES, key=lambda row: row.sizes[:3]):
        group = list(judge.judged(rows))
        best, slower = judge.fastest(group)
        print(f"{best.row}: of {len(group)} estimated fastest, {slower:.2f}x of the fastest one's time", flush=True)
        parts["their tiles"] += group
    for name, part in parts.items():
        median, ninth = judge.errors(one.ratio for one in part)
        print(f"{name}, {len(part)} rows: median error {median:.1%}, 90th percentile {ninth:.1%}")


def command() -> None:
    """Run the console script `ptx-emulator`."""
    sys.exit(main())


if __name__ == "__main__":
    command()
