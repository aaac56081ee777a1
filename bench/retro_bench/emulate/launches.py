"""Kernels that Triton compiled, executed on a launch's arguments, and the launches of our ops on the emulator."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from retro_kernels.compile import aot
from retro_kernels.compile import target as targets
from retro_kernels.compile.target import KNOWN, Target
from retro_kernels.core import backends, eager

from .memory import Arguments
from .parse import PtxError
from .program import Program

#: so few that small tests fill them, and tiny ones don't: as under Triton's interpreter
MULTIPROCESSORS = 12


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as a launch executes it."""

    program: Program
    signature: dict[str, Any]  # Triton's type of every argument in order; a "constexpr" is not a parameter
    shared_bytes: int
    threads: int
    scratch: tuple[int, int] = (0, 1)  # bytes of global memory a CTA, alignment
    descriptors: tuple = ()  # layout of each tensor descriptor in shared memory

    @classmethod
    def of(cls, program: Program, source, metadata) -> Compiled:
        """Read a kernel that Triton compiled. Raises PtxError for parts that are not emulated."""
        if getattr(metadata, "num_ctas", 1) > 1:
            raise PtxError(f"{metadata.name}: not emulated: clusters of {metadata.num_ctas} CTAs (num_ctas)")
        return cls(
            program,
            dict(source.signature),
            metadata.shared,
            program.kernel.threads or 32 * metadata.num_warps,
            (metadata.global_scratch_size, metadata.global_scratch_align),
            tuple(getattr(metadata, "tensordesc_meta", None) or ()),
        )

    def fresh(self) -> Compiled:
        """Return the same kernel with counters of its own."""
        return dataclasses.replace(self, program=type(self.program)(self.program.kernel))


def until_ptx(backend=None, stages=None, *_):
    """Leave ptxas out, because the emulator executes PTX: a hook of Triton. Without arguments: part of a cache key."""
    if stages is None:
        return ("ptx as the binary", "ptx as the binary")
    stages["cubin"] = lambda module, metadata: module.encode()


def execute(
    kernel: Compiled,
    grid: Sequence[int],
    values: Sequence,
    *,
    checks: bool = True,
    only: range | None = None,
    known: Sequence[tuple[int, int]] = (),
) -> None:
    """Execute a kernel over a grid. values: of every argument, constants included; known: as in `Program.run`."""
    made = Arguments()
    descriptors = iter(kernel.descriptors)
    for (name, kind), value in zip(kernel.signature.items(), values, strict=True):
        made.add(kind, value, name, descriptors)
    size, alignment = kernel.scratch
    if size:
        from triton.runtime import _allocation

        scratch = _allocation._allocator.get()(math.prod(grid) * size, alignment, 0)
        made.packed.append(made.region(scratch, "of the global scratch memory"))
    spare = len(kernel.program.kernel.parameters) - len(made.packed)  # Triton's scratch memory: unused
    kernel.program.run(
        grid,
        [*made.packed, *[0] * spare],
        regions=list(made.regions),
        names=list(made.regions.values()),
        known=known,
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        checks=checks,
        only=only,
    )


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
    from retro_kernels.triton_lib.launch import launches_to

    if arch not in KNOWN:
        raise ValueError(f"arch: expected one of {sorted(KNOWN)}; got {arch}")

    def emulated(launch) -> None:
        if log is not None:
            log.append(launch)
        run(launch, arch, checks=checks)

    target = Target(arch, KNOWN[arch].shared_memory, MULTIPROCESSORS)
    with (
        launches_to(emulated),
        mock.patch.object(backend, "interpreted", lambda: True),
        mock.patch.object(backend, "INTERPRETS_BFLOAT16", True),
        mock.patch.object(targets, "INTERPRETED", target),
        contextlib.ExitStack() as stack,
    ):
        for forget in (backends._status.cache_clear, backends._available.cache_clear, eager.forget):
            forget()  # which backends there are, and what was planned with them
            stack.callback(forget)
        yield
