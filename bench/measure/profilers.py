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
            if contender.role == "baseline" or contender.reason(case, None, selection.device):
                continue
            for dtype in choose.dtypes(case, selection):
                for mode in choose.modes(case, selection):
                    if not choose.unsupported(contender, case, dtype, selection.device, mode == "fwdbwd"):
                        name = identity(case.kernel, contender.name, case.name, dtype, mode)
                        yield name, contender, case, dtype, mode


def calls(selection: choose.Selection, count: int, seed: int, quiet: bool = False) -> int:
    """Run every kernel of a selection `count` times, and profiled, after warm-ups. Return the number of kernels."""
    device, done = selection.device, 0
    for name, contender, case, dtype, mode in kernels(selection):
        call = warmed(contender, case, dtype, mode, device, seed)
        with _profiled(device), torch.cuda.nvtx.range(name) if device == "cuda" else contextlib.nullcontext():
            for _ in range(count):
                call()
        done += 1
        if not quiet:
            print(name)
    return done


def warmed(contender: Contender, case: Case, dtype: str, mode: str, device: str, seed: int) -> Callable[[], Any]:
    """Make the timed call from a seed and warm it up."""
    call = runner.step(contender, case, case.make(seed, device, getattr(torch, dtype)), mode == "fwdbwd", seed)
    for _ in range(WARMUPS):
        call()
    return call


@contextlib.contextmanager
def _profiled(device: str) -> Iterator[None]:
    """Switch the GPU's profiler on (cudaProfilerStart), for `ncu --profile-from-start off`."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
