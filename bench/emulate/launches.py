"""Launches of `triton_lib.launch` on the emulator: compiled for a GPU, and their PTX executed here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from retro_kernels.compile import aot
from retro_kernels.compile import target as targets
from retro_kernels.compile.target import KNOWN, Target
from retro_kernels.core import backends, eager

from .kernel import Compiled, execute

#: so few that small tests fill them, and tiny ones don't: as under Triton's interpreter
MULTIPROCESSORS = 12


def made(launch, arch: int):
    """Return (source, compiled kernel) of a launch. `aot` may be that of an older tree."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = aot.source(launch, KNOWN[arch])
    return source, triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options.__dict__)


def compiled(launch, arch: int) -> Compiled:
    """Return the PTX of a launch, loaded. It is compiled to machine code too, which takes a tenth of the time: the
    cache on disk then serves `static` and the emulator alike.
    """
    if isinstance(found := getattr(launch, "compiled", None), Compiled):
        return found
    from .driver import loaded

    source, kernel = made(launch, arch)
    return Compiled.of(loaded(kernel.asm["ptx"].encode()), source, kernel.metadata)


def run(
    launch, arch: int, *, checks: bool = True, only: range | None = None, kernel: Compiled | None = None
) -> Compiled:
    """Execute a launch on CPU tensors as a GPU of `arch` would.

    Args:
        only: some CTAs of the grid, by their number, x fastest.
        kernel: execute this in its place: one with a fault planted.

    Raises:
        EmulationError: an access out of bounds, a race, a wait that is missing, ...; it names the line of the kernel.
    """
    kernel = kernel or compiled(launch, arch)
    values = [launch.arguments.get(name) for name in kernel.signature]
    execute(kernel, launch.grid, values, checks=checks, only=only)
    return kernel


@contextlib.contextmanager
def emulating(arch: int, *, checks: bool = True, log: list | None = None) -> Iterator[None]:
    """Inside, the `triton` backend serves CPU tensors: its kernels are compiled for `arch` and executed by the
    emulator.

    log: every launch is appended to it before it runs.
    """
    from retro_kernels import triton_lib as backend
    from retro_kernels.triton_lib.launch import Launch

    if arch not in KNOWN:
        raise ValueError(f"arch: expected one of {sorted(KNOWN)}; got {arch}")

    def emulated(launch) -> None:
        if log is not None:
            log.append(launch)
        run(launch, arch, checks=checks)

    target = Target(arch, KNOWN[arch].shared_memory, MULTIPROCESSORS)
    with (
        mock.patch.object(Launch, "run", emulated),
        mock.patch.object(backend, "interpreted", lambda: True),
        mock.patch.object(targets, "INTERPRETED", target),
        contextlib.ExitStack() as stack,
    ):
        for forget in (backends._status.cache_clear, backends._available.cache_clear, eager.forget):
            forget()  # which backends there are, and what was planned with them
            stack.callback(forget)
        yield
