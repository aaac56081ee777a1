"""Triton launches on the emulator: what `Launch.run` would send to a
GPU is compiled for one, and its PTX executed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

from torch import Tensor

from retro_kernels.compile import aot
from retro_kernels.compile import target as targets
from retro_kernels.compile.target import KNOWN, Target
from retro_kernels.core import backends, eager

from .program import Program, Region

#: so few that small tests fill them, and tiny ones don't: as under Triton's interpreter
MULTIPROCESSORS = 12


@dataclasses.dataclass(frozen=True)
class Compiled:
    program: Program
    parameters: tuple[str, ...]  # names of the arguments that are parameters, in order
    shared_bytes: int
    threads: int


_compiled: dict = {}
_KEPT = 200  # some megabytes each


def compiled(launch, arch: int) -> Compiled:
    """The PTX of a launch, loaded; each distinct compile once a process (and Triton keeps its own on disk)."""
    src, options = aot.source(launch, KNOWN[arch])
    key = src.hash(), arch, str(sorted(options.__dict__.items(), key=str))
    if key not in _compiled:
        if len(_compiled) >= _KEPT:
            _compiled.clear()
        _compiled[key] = _compile(src, options, arch)
    return _compiled[key]


def _compile(src, options, arch: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", _until_ptx):
        made = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options.__dict__)
    parameters = tuple(name for name, kind in src.signature.items() if kind != "constexpr")
    return Compiled(Program(made.asm["ptx"]), parameters, made.metadata.shared, 32 * made.metadata.num_warps)


def _until_ptx(backend=None, stages=None, *_):
    """Triton's hook: no ptxas, for nothing here reads a cubin. Without arguments it says what its cache's key gets."""
    if stages is None:
        return ("ptx", "ptx")
    stages["cubin"] = lambda module, metadata: b""


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
    arguments, known = [], {}
    for name in kernel.parameters:
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            place = value.data_ptr(), extent(value)
            arguments.append(Region(known.setdefault(place, len(known))))
        else:
            arguments.append(value)
    arguments += [0] * (len(kernel.program.kernel.parameters) - len(arguments))  # Triton's scratch memory: unused
    kernel.program.run(
        launch.grid,
        arguments,
        regions=list(known),
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        checks=checks,
        only=only,
    )
    return kernel


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last, whatever its strides."""
    if tensor.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


@contextlib.contextmanager
def emulating(arch: int, *, checks: bool = True, log: list | None = None) -> Iterator[None]:
    """Inside, the `triton` backend serves CPU tensors: its kernels are compiled for `arch` and executed by the
    emulator.

    log: every launch is appended to it, before it runs.
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
    patches = (
        mock.patch.object(Launch, "run", emulated),
        mock.patch.object(backend, "interpreted", lambda: True),
        mock.patch.object(targets, "INTERPRETED", target),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for forget in (backends._status.cache_clear, backends._available.cache_clear, eager.forget):
            forget()  # which backends there are, and what was planned with them
            stack.callback(forget)
        yield
