"""run a kernel's compiled code without a GPU and count: what is wrong, uncoalesced, in conflict, and on which line

Compiles launches of the shipped cases as a GPU of --arch would have them and executes CTAs from the middle of the grid,
checking bounds, alignment, uninitialised shared memory, races between warps, copies and wgmma not waited for. Exit code
2 if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys

from . import exits, options

LINES = 12  # hot lines of source that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", metavar="PART", help="a part of op/kernel, as `static` names them: cca_forward")
    parser.add_argument("--case", metavar="PART", help="a part of the case's name")
    parser.add_argument("--dtype", choices=options.DTYPES, default="bfloat16")
    parser.add_argument("--arch", type=int, choices=options.EVERY_ARCH, default=90)
    parser.add_argument("--ctas", type=options.positive, default=1, metavar="N", help="CTAs to execute (default 1)")
    parser.add_argument("--all", action="store_true", help="every launch that matches, not the first alone")
    parser.add_argument("--brief", action="store_true", help="a line a launch and their count, in place of reports")


def execute(arguments: argparse.Namespace) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise exits.UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")
    from retro_kernels.compile import aot
    from retro_kernels.compile.target import KNOWN

    from ..emulate import counters
    from ..emulate.parse import PtxError
    from ..emulate.program import EmulationError

    launches = [
        (op, case)
        for op, case in aot.cases(KNOWN[arguments.arch], arguments.kernel)
        if case.dtype == arguments.dtype and (arguments.case or "") in case.case
    ]
    if not launches:
        raise exits.UsageError(
            "no shipped launch has such a kernel, case and type; `python -m bench static --fingerprints FILE` lists "
            "them"
        )
    chosen = launches if arguments.all else launches[:1]
    wrong = strange = 0
    for op, case in chosen:
        print(f"{op}/{case.launch.name}, {case.case}, {case.dtype}, sm_{arguments.arch}, grid {case.launch.grid}")
        try:
            metrics, lines = counters.count(case.launch, arguments.arch, arguments.ctas)
        except EmulationError as error:
            wrong += 1
            print(f"  {error}\n", flush=True)
            continue
        except PtxError as error:
            strange += 1
            print(f"  not emulated: {error}\n", flush=True)
            continue
        if not arguments.brief:
            print(drawn(metrics, lines[:LINES]), flush=True)
    if arguments.brief:
        print(f"{len(chosen)} launches: {wrong} wrong, {strange} not emulated, {len(chosen) - wrong - strange} right")
    if not arguments.all and len(launches) > 1:
        print(f"{len(launches) - 1} more launches match: --all", file=sys.stderr)
    return exits.NUMERICS if wrong else exits.OK


def drawn(metrics: dict, lines: list) -> str:
    """The metrics in sentences, then the hottest lines of source."""
    mix = ", ".join(
        f"{kind} {count}" for kind, count in sorted(metrics["instruction_mix"].items(), key=lambda item: -item[1])
    )
    table = [
        f"  {metrics['emulated_instructions']} instructions a CTA's warp issues: {mix}",
        f"  {metrics['barriers']} barriers; {metrics['global_bytes'] / 1024:.0f} KiB in sectors of global memory",
        f"  sectors a request {_shown(metrics['sectors_per_request'])}; of the fewest possible: sectors "
        f"{_shown(metrics['sectors_over_fewest'])}x, "
        f"shared wavefronts {_shown(metrics['wavefronts_over_fewest'])}x",
        f"  {'line':<32} instructions  requests  sectors or wavefronts  fewest",
    ]
    for line in lines:
        table.append(
            f"  {line.source:<32} {line.instructions:>12}  {line.requests:>8}  {line.sectors_or_wavefronts:>21}  "
            f"{line.fewest:>6}"
        )
    return "\n".join([*table, ""])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
