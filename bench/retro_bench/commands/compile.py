"""compile the GPU launches of a selection ahead of time

Compiles into Triton's cache, where `check`, `run` and `tune` find the kernels. Names each kernel that does not compile
and goes on. --presets needs no GPU: it compiles the launches of the published models for --arch into a folder. On a
machine with the same versions of triton and Python `retro_kernels.warm_up(cache=...)` takes that folder over.
"""

import argparse
import time
from pathlib import Path

from ..measure import choose
from . import exits, options
from .progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_deadline(parser)
    parser.add_argument("--presets", action="store_true", help="compile the published models' launches into --output")
    options.add_arch(parser, "90")
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --presets: write to this folder")
    parser.add_argument("--jobs", type=options.positive, help="compile in this many processes (default: one per core)")


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

    def progress(count: int) -> None:
        if count % 10 == 0:
            say(f"{count} compiled")

    begun, folder, arches = time.monotonic(), arguments.output, options.arches(arguments.arch)
    ops = arguments.op or (None,)
    count = sum(shipped.export(folder, arches, op, arguments.jobs, progress) for op in ops)
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{count} launches in {time.monotonic() - begun:.0f} s; {held / 1e6:.1f} MB in {folder}")
    return exits.OK
