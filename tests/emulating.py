"""The `triton` backend on CPU tensors: its kernels as compiled for a GPU, executed by ptx_emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ptx_emulator import launches
from retro_kernels import triton_lib as backend
from retro_kernels.compile import target as targets
from retro_kernels.compile.target import NVIDIA, Target
from retro_kernels.core import dispatch, layouts
from retro_kernels.triton_lib.launch import launches_to

#: so few that small tests fill them, and tiny ones don't: as under Triton's interpreter
MULTIPROCESSORS = 12


@contextlib.contextmanager
def emulating(arch: int, *, checks: bool = True, log: list | None = None) -> Iterator[None]:
    """Inside, the `triton` backend serves CPU tensors: its kernels are compiled for `arch` and executed by the
    emulator.

    log: every launch is appended to it before it runs.
    """
    if arch not in NVIDIA:
        raise ValueError(f"arch: expected one of {sorted(NVIDIA)}; got {arch}")

    def emulated(launch) -> None:
        if log is not None:
            log.append(launch)
        launches.run(launch, arch, checks=checks)

    target = Target(arch, NVIDIA[arch].shared_memory, MULTIPROCESSORS)
    with (
        launches_to(emulated),
        mock.patch.object(backend, "interpreted", lambda: True),
        mock.patch.object(backend, "INTERPRETS_BFLOAT16", True),
        mock.patch.object(targets, "INTERPRETED", target),
        contextlib.ExitStack() as stack,
    ):
        for forget in (dispatch._status.cache_clear, dispatch._available.cache_clear, layouts.forget):
            forget()  # forget the available backends and what followed from them
            stack.callback(forget)
        yield
