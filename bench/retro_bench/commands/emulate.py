"""execute compiled GPU kernels on the CPU, with checks and counters

Compiles launches of the shipped cases for --arch and executes one CTA from the middle of the grid. Checks bounds,
alignment, uninitialised shared memory, races between warps, and copies and wgmma that nothing waits for. Exit code 2 if
something is wrong, 5 if nothing was executed. `ptx-emulator run FILE.py::FUNCTION` does the same for any function that
launches Triton kernels.
"""

import argparse

from . import emulator, exits, options
from .progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_executed(parser)
    add, arch = parser.add_argument, "compile for this architecture (default 90)"
    add("--arch", type=int, choices=options.EVERY_ARCH, default=90, help=arch)
    add("--all", action="store_true", help="execute every launch that matches, not only the first")
    add("--brief", action="store_true", help="print one line a launch instead of reports")


def execute(arguments: argparse.Namespace) -> int:
    emulator.required()
    from ptx_emulator import EmulationError, PtxError, counters
    from ptx_emulator.command import LINES, drawn

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
            metrics, lines = counters.count(one.launch, arguments.arch)
            if not arguments.brief:
                print(drawn(metrics, lines[:LINES]), flush=True)
        except EmulationError as error:
            wrong += 1
            print(f"  {error}\n", flush=True)
        except PtxError as error:
            strange += 1
            print(f"  not emulated: {error}\n", flush=True)
    print(f"{len(chosen)} launches: {wrong} wrong, {strange} not emulated, {len(chosen) - wrong - strange} right")
    if not arguments.all and len(launches) > 1:
        say(f"{len(launches) - 1} more launches match: --all")
    return exits.NUMERICS if wrong else exits.OK if strange < len(chosen) else exits.NOTHING_MEASURED
