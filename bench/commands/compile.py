"""compile the GPU launches of a selection ahead of time

Compiles into Triton's cache, where `check`, `run` and `tune` find the kernels. Names each kernel that does not compile
and goes on. --presets needs no GPU: it compiles the launches of the published models into a folder.
`retro_kernels.warm_up(cache=...)` takes that folder over on a machine with the same versions of triton and Python.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..measure import choose
from . import exits, options
from .progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_deadline(parser)
    parser.add_argument("--presets", action="store_true", help="what the published models launch, into --output")
    parser.add_argument("--arch", default="90", help="with --presets: comma-separated, of 80, 90, 100 (default 90)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --presets: the folder")
    parser.add_argument("--jobs", type=options.positive, help="processes (default one a core)")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.presets != (arguments.output is not None):
        raise exits.UsageError("--presets, --output: expected both or neither")
    if arguments.presets:
        return _presets(arguments)
    from ..measure import compiling

    selection, begun = options.selection(arguments), time.monotonic()
    count, failed, late = compiling.compile_selection(selection, say, arguments.jobs, arguments.deadline)
    print(f"{count} kernels of {len(choose.cases(selection))} cases in {time.monotonic() - begun:.0f} s")
    if late:
        say("the deadline is over")
        return exits.INCONCLUSIVE
    return exits.NUMERICS if failed else exits.OK


def _presets(arguments: argparse.Namespace) -> int:
    from retro_kernels.compile import shipped

    begun, kernels = time.monotonic(), arguments.kernel or (None,)
    count = sum(
        shipped.export(
            arguments.output,
            options.arches(arguments.arch),
            kernel,
            arguments.jobs,
            lambda count: say(f"{count} compiled") if count % 10 == 0 else None,
        )
        for kernel in kernels
    )
    bytes_held = sum(file.stat().st_size for file in arguments.output.rglob("*") if file.is_file())
    print(f"{count} launches in {time.monotonic() - begun:.0f} s; {bytes_held / 1e6:.1f} MB in {arguments.output}")
    return exits.OK
