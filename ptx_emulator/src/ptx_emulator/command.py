"""`ptx-emulator run|estimate FILE.py::FUNCTION`: the Triton launches of a function, executed or timed without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

OK, FAULT, USAGE = 0, 2, 4  # exit codes
LINES = 12  # hot lines of source that are shown
ARCHES = (80, 86, 89, 90, 100, 120)


class UsageError(Exception):
    """Error: a command line that cannot be served."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="ptx-emulator", description="Execute Triton kernels without a GPU.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    codes = "Exit codes: 0 ok, 2 a kernel has a fault, 4 usage."
    run = commands.add_parser("run", help="execute launches with checks and counters", epilog=codes)
    run.add_argument("call", metavar="FILE.py::FUNCTION", help="execute the launches of this function")
    run.add_argument("--arch", type=int, choices=ARCHES, default=90, help="compile for this architecture (default 90)")
    run.add_argument("--brief", action="store_true", help="print one line per launch instead of reports")
    run.set_defaults(execute=_run)
    model = commands.add_parser("estimate", help="estimate the time of launches", epilog=codes)
    model.add_argument("call", nargs="?", metavar="FILE.py::FUNCTION", help="estimate the launches of this function")
    model.add_argument("--machine", default="H200", metavar="GPU", help="A100, H100, H200, B200, ... (default H200)")
    model.add_argument("--calibration", action="store_true", help="estimate published kernels; takes minutes")
    model.set_defaults(execute=_estimate)
    return top


def main(argv: list[str] | None = None) -> int:
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:
        return USAGE if stop.code else OK
    try:
        refuse_interpreter()
        return arguments.execute(arguments)
    except UsageError as error:
        print(f"ptx-emulator: {error}", file=sys.stderr)
        return USAGE


def refuse_interpreter() -> None:
    """Raise UsageError if Triton interprets kernels in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")


def launches(target: str, arch: int, counts: bool = True) -> list:
    """Call FUNCTION(), whose tensors may be on "cuda" or on the CPU, and return a list of `Execution`.

    Raises:
        UsageError: the file or function does not exist, or it launches nothing. EmulationError, PtxError: from a
        kernel.
    """
    from .context import gpu

    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name or not path.is_file():
        raise UsageError(f"{target}: expected FILE.py::FUNCTION with a file that exists")
    with gpu(arch, counts=counts, cuda=True) as log:
        sys.path.insert(0, str(path.parent.resolve()))
        try:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        function = getattr(module, name, None)
        if not callable(function):
            raise UsageError(f"{target}: {path.name} has no function {name}")
        function()
    if not log.launches:
        raise UsageError(f"{target}: the call launched no Triton kernel")
    return log.launches


def _run(arguments: argparse.Namespace) -> int:
    from .parse import PtxError
    from .program import EmulationError

    try:
        executed = launches(arguments.call, arguments.arch)
    except EmulationError as error:
        print(error)
        return FAULT
    except PtxError as error:
        raise UsageError(f"not emulated: {error}") from None
    for launch in executed:
        print(titled(launch))
        for note in launch.notes:
            print(f"  note: {note}")
        if not arguments.brief:
            print(drawn(launch.counters(), launch.lines()[:LINES], "the grid"), flush=True)
    print(f"{len(executed)} launches: nothing wrong")
    return OK


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
        counts = f"{line.requests:>8}  {line.sectors_or_wavefronts:>21}  {line.fewest:>6}"
        table.append(f"  {line.source:<32} {line.instructions:>12}  {counts}")
    return "\n".join([*table, ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _estimate(arguments: argparse.Namespace) -> int:
    from .machines import machine
    from .parse import PtxError
    from .program import EmulationError

    if arguments.calibration:
        return _calibration()
    if arguments.call is None:
        raise UsageError("estimate: expected FILE.py::FUNCTION or --calibration")
    try:
        known = machine(arguments.machine)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    total = 0.0
    try:
        for launch in launches(arguments.call, known.arch, counts=False):
            found = launch.estimate(known.name)
            total += found.seconds
            print(f"{titled(launch)}: {1e6 * found.seconds:.1f} us, {found.bound}")
    except EmulationError as error:
        print(error)
        return FAULT
    except PtxError as error:
        raise UsageError(f"not emulated: {error}") from None
    print(f"{1e6 * total:.1f} us; estimated for one {known.name}, not measured")
    return OK


def _calibration() -> int:
    """Print published times next to their estimates, and the errors."""
    from .estimate.calibration import judge, published

    rows, lines = [], [("kernel", "GPU", "type", "sizes", "us", "estimated", "bound", "")]
    for one in judge.judged():
        rows.append(one)
        sizes = "x".join(map(str, one.row.sizes))
        held = "held back" if one.held_back else ""
        measured, ratio = f"{one.row.microseconds:g}", f"{one.ratio:.2f}x"
        lines.append((one.row.kernel, one.row.machine, one.row.dtype, sizes, measured, ratio, one.bound, held))
        _dot()
    print(aligned(lines))
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
    print(aligned(lines))
    median, ninth = judge.errors(ratios)
    print(f"their tiles, {len(ratios)} rows: median error {median:.1%}, 90th percentile {ninth:.1%}")
    return OK


def _dot() -> None:
    """Show that a row is done."""
    print(".", end="", file=sys.stderr, flush=True)


def aligned(table: list[tuple[str, ...]]) -> str:
    """Format a table in columns of equal width."""
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def command() -> None:
    """Run the console script `ptx-emulator`."""
    sys.exit(main())


if __name__ == "__main__":
    command()
