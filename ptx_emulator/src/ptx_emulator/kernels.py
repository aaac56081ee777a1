"""Kernels that Triton compiled, executed on the arguments of a launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from triton.runtime import _allocation

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
        return dataclasses.replace(self, program=Program(self.program.kernel))

    def packed(self, values: Sequence, bounds: str = "tensor") -> Arguments:
        """Return a launch's arguments as parameters and regions. values: of every argument, constants included."""
        made = Arguments(bounds)
        descriptors = iter(self.descriptors)
        for (name, kind), value in zip(self.signature.items(), values, strict=True):
            made.add(kind, value, name, descriptors)
        return made

    def execute(self, grid: Sequence[int], values: Sequence, *, bounds: str = "tensor", **options) -> None:
        """Execute the kernel over a grid.

        Args:
            grid: programs; each is one CTA, or a cluster of `num_ctas`.
            values: as in `packed`. bounds: as in `gpu`. options: `known`, `checks` and `only` of `Program.run`.
        """
        made = self.packed(values, bounds)
        size, alignment = self.scratch
        grid = (self.ctas * grid[0], *grid[1:])
        if size:
            scratch = _allocation._allocator.get()(math.prod(grid) * size, alignment, 0)
            made.packed.append(made.address(scratch, "of the global scratch memory").to_bytes(8, "little"))
        made.packed += [b""] * (len(self.program.kernel.parameters) - len(made.packed))  # scratch memory, unused
        regions = list(made.regions.values())
        self.program.run(
            grid, made.packed, regions=regions, threads=self.threads, shared_bytes=self.shared_bytes, **options
        )
