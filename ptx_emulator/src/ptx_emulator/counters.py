"""Counters of one CTA of a launch: instructions by kind, sectors and wavefronts a request, barriers."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy
import torch
from torch import Tensor

from . import launches
from .launches import Launch
from .memory import elements, replaced
from .program import Counted

SECTOR_BYTES = 32
#: most elements that are filled; larger tensors stay zero, for only the addresses matter and filling takes seconds
_FILLED = 1 << 22
_ALIGNED = 256  # bytes: where an allocation on a GPU begins

#: kind of an instruction -> first parts of its opcodes
_KINDS = {
    "tensor": ("mma", "wgmma", "tcgen05"),
    "memory": ("ld", "st", "cp", "ldmatrix", "stmatrix"),
    "special": ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "div"),
    "exchange": ("shfl", "vote", "redux", "elect"),
    "synchronise": ("bar", "barrier", "fence", "membar", "mbarrier"),
    "branch": ("bra", "ret", "exit"),
}
_KIND_OF = {root: kind for kind, roots in _KINDS.items() for root in roots}


def materialised(launch):
    """Return the launch with CPU tensors instead of meta tensors: random floats, integers 0, masks all True."""
    generator = torch.Generator().manual_seed(0)

    def real(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        out = _zeros(tensor)
        if out.numel() <= _FILLED and out.is_floating_point():
            out.copy_(torch.randn(out.shape, generator=generator))
        elif out.dtype in (torch.bool, torch.uint8):
            out.fill_(1)
        return out

    return replaced(Launch.of(launch), real)


def _zeros(like: Tensor) -> Tensor:
    """Allocate zeros of the shape and strides, aligned as on a GPU. The system supplies pages when they are used."""
    size = elements(like) * like.element_size()
    memory = torch.from_numpy(numpy.zeros(size + _ALIGNED, numpy.uint8))
    first = -memory.data_ptr() % _ALIGNED
    memory = memory[first : first + size].view(like.dtype)
    return memory.as_strided(like.shape, like.stride(), memory.storage_offset())


def count(launch, arch: int) -> tuple[dict[str, Any], list[Counted]]:
    """Return (metrics, lines) of the CTA in the middle of a launch's grid.

    Raises:
        EmulationError: the kernel did something wrong.
        PtxError: an instruction is not emulated.
    """
    kernel = launches.compiled(launch, arch).fresh()
    middle = max(0, (math.prod(launch.grid) - 1) // 2)
    launches.run(materialised(launch), arch, only=range(middle, middle + 1), kernel=kernel)
    counted = kernel.program.counts()
    return summary(counted), by_line(counted)


def summary(counted: list[Counted]) -> dict[str, Any]:
    """Return the metrics of a record. A ratio is None without requests."""
    mix = collections.Counter()
    for c in counted:
        mix[_KIND_OF.get(c.opcode.split(".")[0], "arithmetic")] += c.executed
    outside = [c for c in counted if c.requests and "global" in c.opcode.split(".")]
    inside = [c for c in counted if c.requests and "global" not in c.opcode.split(".")]
    sectors, wavefronts = sum(c.units for c in outside), sum(c.units for c in inside)
    return {
        "emulated_instructions": sum(mix.values()),
        "instruction_mix": dict(sorted(mix.items())),
        "barriers": sum(c.executed for c in counted if c.opcode.startswith(("bar.sync", "barrier"))),
        "sectors_per_request": _ratio(sectors, sum(c.requests for c in outside)),
        "sectors_over_fewest": _ratio(sectors, sum(c.fewest for c in outside)),
        "wavefronts_over_fewest": _ratio(wavefronts, sum(c.fewest for c in inside)),
        "global_bytes": SECTOR_BYTES * sectors,
    }


def by_line(counted: list[Counted]) -> list[Counted]:
    """Return the sums over the opcodes of each line of source, those that execute most first."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    for c in counted:
        for at, value in enumerate((c.executed, c.requests, c.units, c.fewest)):
            sums[c.line][at] += value
    return sorted((Counted("", line, *values) for line, values in sums.items()), key=lambda one: -one.executed)


def _ratio(a: int, b: int) -> float | None:
    return round(a / b, 3) if b else None
