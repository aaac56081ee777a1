"""execute compiled GPU kernels on the CPU, with checks and counters

Compiles launches of the shipped cases for --arch and executes CTAs from the middle of the grid. Checks bounds,
alignment, uninitialised shared memory, races between warps, and copies and wgmma that nothing waits for. Exit code 2 if
something is wrong.
"""

import argparse

from ..report.summary import number
from . import calls, exits, options
from .progress import say

LINES = 12  # hot lines of source that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_executed(parser)
    add, arch = parser.add_argument, "compile for this architecture (default 90)"
    add("--arch", type=int, choices=options.EVERY_ARCH, default=90, help=arch)
    add("--ctas", type=options.positive, default=1, metavar="N", help="CTAs to execute (default 1)")
    add("--all", action="store_true", help="execute every launch that matches, not only the first")
    add("--brief", action="store_true", help="print one line a launch instead of reports")


def execute(arguments: argparse.Namespace) -> int:
    calls.refuse_interpreter()
    if arguments.call:
        return _called(arguments)
    from ..emulate import EmulationError, PtxError, counters
    from ..static import triton_kernels

    every = triton_kernels.launches([arguments.arch], options.parts(arguments))
    launches = [one for one in every if one.wanted and options.launch_matches(one, arguments)]
    if not launches:
        raise exits.UsageError("no launch has such a kernel, case and type; `retro-bench static` lists them")
    chosen = launches if arguments.all else launches[:1]
    wrong = strange = 0
    for one in chosen:
        print(f"{one.id.removesuffix('/static')}, grid {one.launch.grid}")
        try:
            metrics, lines = counters.count(one.launch, arguments.arch, arguments.ctas)
            if not arguments.brief:
                print(drawn(metrics, lines[:LINES]), flush=True)
        except EmulationError as error:
            wrong += 1
            print(f"  {error}\n", flush=True)
        except PtxError as error:
            strange += 1
            print(f"  not emulated: {error}\n", flush=True)
    if arguments.brief:
        print(f"{len(chosen)} launches: {wrong} wrong, {strange} not emulated, {len(chosen) - wrong - strange} right")
    if not arguments.all and len(launches) > 1:
        say(f"{len(launches) - 1} more launches match: --all")
    return exits.NUMERICS if wrong else exits.OK


def _called(arguments: argparse.Namespace) -> int:
    """Execute the launches of FILE.py::FUNCTION, whole grids."""
    from ..emulate import EmulationError, PtxError

    try:
        launches = calls.launches(arguments.call, arguments.arch)
    except EmulationError as error:
        print(error)
        return exits.NUMERICS
    except PtxError as error:
        raise exits.UsageError(f"not emulated: {error}") from None
    for launch in launches:
        print(calls.titled(launch))
        if not arguments.brief:
            print(drawn(launch.counters(), launch.lines()[:LINES], "the grid"), flush=True)
    print(f"{len(launches)} launches: nothing wrong")
    return exits.OK


def drawn(metrics: dict, lines: list, of: str = "a CTA") -> str:
    """Format the metrics as sentences, then the hottest lines of source."""
    kinds = sorted(metrics["instruction_mix"].items(), key=lambda item: -item[1])
    mix = ", ".join(f"{kind} {count}" for kind, count in kinds)
    table = [
        f"  {metrics['emulated_instructions']} instructions of {of}, for all its warps at once: {mix}",
        f"  {metrics['barriers']} barriers; {metrics['global_bytes'] / 1024:.0f} KiB in sectors of global memory",
        f"  sectors a request {number(metrics['sectors_per_request'])}; of the fewest possible: sectors "
        f"{number(metrics['sectors_over_fewest'])}x, shared wavefronts {number(metrics['wavefronts_over_fewest'])}x",
        f"  {'line':<32} instructions  requests  sectors or wavefronts  fewest",
    ]
    for line in lines:
        counts = f"{line.requests:>8}  {line.sectors_or_wavefronts:>21}  {line.fewest:>6}"
        table.append(f"  {line.source:<32} {line.instructions:>12}  {counts}")
    return "\n".join([*table, ""])
