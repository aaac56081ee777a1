"""GPU: compile what the selection will launch, in a process a core, before anything is checked or timed

Into Triton's cache, where `check`, `run` and `tune` find it. A kernel that doesn't compile is named; the others are.
"""

from __future__ import annotations

import argparse
import sys
import time

from .. import exits, plan
from ..measure import runner
from ..measure.pace import Pace
from ..registry import CONTENDERS
from . import _options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_selection(parser)
    _options.add_deadline(parser)
    parser.add_argument("--jobs", type=_options.positive, help="processes (default one a core)")


def execute(arguments: argparse.Namespace) -> int:
    import torch

    import retro_kernels as rk

    selection, begun, count = _options.selection(arguments), time.monotonic(), 0
    pace, failed = Pace([], arguments.deadline), 0
    for case in plan.cases(selection):
        contender = CONTENDERS.get((case.kernel, "triton"))
        for dtype in plan.dtypes(case, selection) if contender else ():
            if pace.over():
                say("the deadline is over")
                return exits.INCONCLUSIVE
            if plan.unsupported_case(case, selection.device) or plan.unsupported(
                contender, case, dtype, selection.device, False
            ):
                continue
            inputs = case.make(0, selection.device, getattr(torch, dtype))
            modes = plan.modes(case, selection)
            steps = [runner.step(contender, case, inputs, mode == "fwdbwd", 0) for mode in modes]
            try:
                count += rk.warm_up(*steps, jobs=arguments.jobs)
            except (RuntimeError, ValueError) as error:
                failed += 1
                say(f"{case.kernel}/{case.name}/{dtype}: {error}")
    print(f"{count} kernels of {len(plan.cases(selection))} cases in {time.monotonic() - begun:.0f} s")
    return exits.NUMERICS if failed else exits.OK


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
