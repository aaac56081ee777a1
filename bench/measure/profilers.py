"""Other people's profilers over our calls, and other people's clocks beside ours.

`calls` runs a selection and nothing else, inside an NVTX range a measurement: what Nsight Compute, Nsight Systems and
Proton are pointed at. `recipes` are the command lines. `other_clock` times a call as triton or torch would.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..records.record import identity
from . import choose, runner

#: Nsight Compute's sections and Nsight Systems' reports that answer the first questions
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "SourceCounters")
REPORTS = ("nvtx_gpu_proj_sum", "cuda_gpu_kern_sum", "cuda_api_sum")
CLOCK_S = 0.2  # of samples by the other clock
WARMUPS = 2


@contextlib.contextmanager
def named_range(name: str, device: str) -> Iterator[None]:
    """An NVTX range on a GPU; nothing on a CPU, whose torch may be built without."""
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def kernels(selection: choose.Selection) -> Iterator[tuple[str, Any, Any, str, str]]:
    """(id, contender, case, dtype, mode) of every kernel of a selection that serves its call."""
    for case in choose.cases(selection):
        for contender in choose.contenders(case, selection):
            if contender.role == "baseline" or contender.reason(case, None, selection.device):
                continue
            for dtype in choose.dtypes(case, selection):
                for mode in choose.modes(case, selection):
                    if not choose.unsupported(contender, case, dtype, selection.device, mode == "fwdbwd"):
                        yield (
                            identity(case.kernel, contender.name, case.name, dtype, mode),
                            contender,
                            case,
                            dtype,
                            mode,
                        )


def calls(selection: choose.Selection, count: int, seed: int, proton: str | None = None, quiet: bool = False) -> int:
    """Runs every kernel of a selection `count` times, after warm-ups that no profiler sees; gives how many kernels
    there were.

    On a GPU the profiler is switched on (cudaProfilerStart) around those calls alone, each kernel's inside a range of
    its id. proton: the file, without its suffix, that triton's profiler writes, a scope an id.
    """
    device, done = selection.device, 0
    scopes = _proton(proton)
    for name, contender, case, dtype, mode in kernels(selection):
        tensors = case.make(seed, device, getattr(torch, dtype))
        call = runner.step(contender, case, tensors, mode == "fwdbwd", seed)
        for _ in range(WARMUPS):
            call()
        with _profiled(device), named_range(name, device), scopes(name):
            for _ in range(count):
                call()
        done += 1
        if not quiet:
            print(name)
    if proton is not None:
        import triton.profiler

        triton.profiler.finalize()
    return done


def _proton(path: str | None) -> Callable[[str], contextlib.AbstractContextManager]:
    """Return a maker of scopes for triton's profiler; they do nothing where `path` is None."""
    if path is None:
        return lambda name: contextlib.nullcontext()
    import triton.profiler

    triton.profiler.start(path, context="shadow")
    return triton.profiler.scope


@contextlib.contextmanager
def _profiled(device: str) -> Iterator[None]:
    """Profilers that wait for it (`ncu --profile-from-start off`) see what runs within."""
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


def recipes(selected: list[str], out: str = "profile") -> dict[str, str]:
    """Name -> command line, for a selection given as options of `profile`."""
    ours = shlex.join(["python", "-m", "bench", "profile", *selected])
    sections = " ".join(f"--section {name}" for name in SECTIONS)
    return {
        "Nsight Compute: one report a kernel, its range's name beside "
        "it": f"ncu --profile-from-start off --nvtx {sections} -o {out} {ours} --calls 1",
        "the same as CSV": f"ncu --import {out}.ncu-rep --csv --page raw > {out}.csv",
        "Nsight Systems: launches, gaps and copies along "
        "time": f"nsys profile --trace=cuda,nvtx -o {out} {ours} --calls 20",
        "its tables, by range, as CSV": f"nsys stats --report {','.join(REPORTS)} --format csv {out}.nsys-rep",
        "Proton, triton's own: no other tool, a tree of "
        "scopes": f"{ours} --calls 20 --proton {out} && proton-viewer -m time/us,util {out}.hatchet",
    }


def other_clock(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call as `triton.testing.do_bench` (GPU, median) or
    `torch.utils.benchmark` (CPU, minimum) measure it.
    """
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, rep=int(CLOCK_S * 1e3), return_mode="median") / 1e3
    from torch.utils import benchmark

    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=CLOCK_S).times)
