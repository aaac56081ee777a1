"""Triton launches on the emulator: what `Launch.run` would send to a
GPU is compiled for one, and its PTX executed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from retro_kernels import _dispatch, _eager, _target, aot
from retro_kernels._target import KNOWN, Target

from .memory import Arguments
from .parse import PtxError
from .program import Program

#: so few that small tests fill them, and tiny ones don't: as under Triton's interpreter
MULTIPROCESSORS = 12


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as a launch executes it."""

    program: Program
    signature: dict[str, Any]  # Triton's type of every argument in order; "constexpr" is no parameter
    shared_bytes: int
    threads: int
    scratch: tuple[int, int] = (0, 1)  # bytes of global memory a CTA, alignment
    descriptors: tuple = ()  # how each tensor descriptor lies in shared memory

    @classmethod
    def of(cls, program: Program, source, metadata) -> Compiled:
        """What Triton compiled; PtxError: what of it is not emulated."""
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
        """The same with counters of its own."""
        return dataclasses.replace(self, program=type(self.program)(self.program.kernel))


_compiled: dict = {}
_KEPT = 200  # some megabytes each


def compiled(launch, arch: int) -> Compiled:
    """The PTX of a launch, loaded; each distinct compile once a process (and Triton keeps its own on disk)."""
    if isinstance(found := getattr(launch, "compiled", None), Compiled):
        return found
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

    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", until_ptx):
        made = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options.__dict__)
    return Compiled.of(Program(made.asm["ptx"]), src, made.metadata)


def until_ptx(backend=None, stages=None, *_):
    """Triton's hook: no ptxas, for the emulator executes PTX. Without arguments it says what its cache's key gets."""
    if stages is None:
        return ("ptx as the binary", "ptx as the binary")
    stages["cubin"] = lambda module, metadata: module.encode()


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


@contextlib.contextmanager
def emulating(arch: int, *, checks: bool = True, log: list | None = None) -> Iterator[None]:
    """Inside, the `triton` backend serves CPU tensors: its kernels are compiled for `arch` and executed by the
    emulator.

    log: every launch is appended to it, before it runs.
    """
    from retro_kernels import triton as backend
    from retro_kernels.triton.common.launch import Launch

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
        mock.patch.object(_target, "INTERPRETED", target),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for forget in (_dispatch._status.cache_clear, _dispatch._available.cache_clear, _eager.forget):
            forget()  # which backends there are, and what was planned with them
            stack.callback(forget)
        yield
