"""Run the kernels of a selection for a profiler, each inside an NVTX range.

docs/profiling.md has the command lines of Nsight Compute and Nsight Systems.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..records.record import identity
from ..registry import Case, Contender
from . import choose, runner

WARMUPS = 2


def kernels(selection: choose.Selection) -> Iterator[tuple[str, Contender, Case, str, str]]:
    """Yield (id, contender, case, dtype, mode) of every kernel of a selection that serves its call."""
    for case in choose.cases(selection):
        for contender in choose.contenders(case, selection):
            if contender.role == "baseline":
                continue
            for dtype in choose.dtypes(case, selection):
                for mode in choose.modes(case, selection):
                    if not choose.unsupported(contender, case, dtype, selection.device, mode == "fwdbwd"):
                        name = identity(case.op, contender.name, case.name, dtype, mode)
                        yield name, contender, case, dtype, mode


def calls(selection: choose.Selection, count: int, seed: int, quiet: bool = False) -> int:
    """Run every kernel of a selection `count` times, and profiled, after warm-ups. Return the number of kernels."""
    device, done = selection.device, 0
    for name, contender, case, dtype, mode in kernels(selection):
        call = warmed(contender, case, dtype, mode, device, seed)
        with contextlib.ExitStack() as stack:
            if device == "cuda":  # for `ncu --profile-from-start off`
                torch.cuda.synchronize()
                stack.enter_context(torch.cuda.profiler.profile())
                stack.enter_context(torch.cuda.nvtx.range(name))
                stack.callback(torch.cuda.synchronize)
            for _ in range(count):
                call()
        done += 1
        if not quiet:
            print(name)
    return done


def warmed(contender: Contender, case: Case, dtype: str, mode: str, device: str, seed: int) -> Callable[[], Any]:
    """Make the timed call from a seed and warm it up."""
    call = runner.step(contender, case, case.make(seed, device, getattr(torch, dtype)), mode == "fwdbwd")
    for _ in range(WARMUPS):
        call()
    return call
