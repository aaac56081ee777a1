"""Kernels that Triton compiled, executed on the arguments of a launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .memory import Arguments
from .parse import PtxError
from .program import Program


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as a launch executes it."""

    program: Program
    signature: dict[str, Any]  # Triton's type of every argument in order; a "constexpr" is not a parameter
    shared_bytes: int
    threads: int
    scratch: tuple[int, int] = (0, 1)  # bytes of global memory per CTA, alignment
    descriptors: tuple = ()  # layout of each tensor descriptor in shared memory

    @classmethod
    def of(cls, program: Program, source, metadata) -> Compiled:
        """Read a kernel that Triton compiled. Raises PtxError for parts that are not emulated."""
        if (ctas := getattr(metadata, "num_ctas", 1)) != program.kernel.cluster[0]:
            raise PtxError(f"{metadata.name}: not emulated: num_ctas={ctas} without .reqnctapercluster {ctas}")
        threads = program.kernel.threads or 32 * metadata.num_warps
        scratch = (metadata.global_scratch_size, metadata.global_scratch_align)
        layouts = tuple(getattr(metadata, "tensordesc_meta", None) or ())
        return cls(program, dict(source.signature), metadata.shared, threads, scratch, layouts)

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, which is one program of Triton's grid."""
        return math.prod(self.program.kernel.cluster)

    def fresh(self) -> Compiled:
        """Return the same kernel with counters of its own."""
        return dataclasses.replace(self, program=type(self.program)(self.program.kernel))


def packed(kernel: Compiled, values: Sequence, bounds: str = "tensor") -> Arguments:
    """Return a launch's arguments as parameters and regions. values: of every argument, constants included."""
    made = Arguments(bounds=bounds)
    descriptors = iter(kernel.descriptors)
    for (name, kind), value in zip(kernel.signature.items(), values, strict=True):
        made.add(kind, value, name, descriptors)
    return made


def execute(
    kernel: Compiled,
    grid: Sequence[int],
    values: Sequence,
    *,
    checks: bool = True,
    only: range | None = None,
    known: Sequence[tuple[int, int]] = (),
    bounds: str = "tensor",
) -> None:
    """Execute a kernel over a grid.

    Args:
        grid: programs; each is one CTA, or a cluster of `num_ctas`. only: some of them.
        values: of every argument, constants included.
        known: as in `Program.run`. bounds: as in `gpu`.
    """
    made = packed(kernel, values, bounds)
    size, alignment = kernel.scratch
    grid = (kernel.ctas * grid[0], *grid[1:])
    if size:
        from triton.runtime import _allocation

        scratch = _allocation._allocator.get()(math.prod(grid) * size, alignment, 0)
        made.packed.append(made.region(scratch, "of the global scratch memory"))
    spare = len(kernel.program.kernel.parameters) - len(made.packed)  # Triton's scratch memory: unused
    kernel.program.run(
        grid, [*made.packed, *[0] * spare], regions=list(made.regions), names=list(made.regions.values()),
        around=made.around, known=known, threads=kernel.threads, shared_bytes=kernel.shared_bytes, checks=checks,
        only=only,
    )  # fmt: skip
