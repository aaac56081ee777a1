"""GPU that a tile is chosen or a kernel compiled for, as a plain value. Importing probes no device."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

import torch


@dataclasses.dataclass(frozen=True)
class Target:
    """arch: compute capability times ten (90), or the name of an AMD processor ("gfx942"). shared_memory: bytes that a
    block can have at most (AMD's LDS). backend: of Triton's compiler. warp_size: threads of a warp (AMD's wavefront).
    """

    arch: int | str
    shared_memory: int
    multiprocessors: int = 132
    backend: str = "cuda"  # or "hip"
    warp_size: int = 32

    @property
    def name(self) -> str:
        """Return "sm_90" or "gfx942"."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def nearest(self, arches: Iterable[int | str]) -> int | str:
        """Return the architecture whose tiles serve the target: the newest up to the target's, or the oldest.

        An AMD processor without rows of its own takes the rows of the first processor with its warp size. Raises
        KeyError if no processor has such rows.
        """
        if self.backend == "cuda":
            known = [arch for arch in arches if isinstance(arch, int)]
            return max((arch for arch in known if arch <= self.arch), default=min(known))
        for arch in (self.arch, _FIRST_AMD[self.warp_size]):
            if arch in arches:
                return arch
        raise KeyError(f"no tiles for {self.arch}")


#: oldest architecture of NVIDIA that the GPU backends serve: it introduced bfloat16 products and asynchronous copies
OLDEST_ARCH = 80
#: AMD's processors with matrix instructions for bfloat16: CDNA 2 to 4 (MFMA), RDNA 3 and 4 (WMMA)
_AMD_SERVED = re.compile(r"gfx(90a|94\w|95\w|11\w\w|12\w\w)")
_FIRST_AMD = {64: "gfx942", 32: "gfx1100"}

#: A100, RTX 3090 and A10, RTX 4090 and L40S, H100 SXM and H200, B200, RTX 5090. CUDA C++ Programming Guide, technical
#: specifications: 163, 99, 99, 227, 227 and 99 KiB a block.
NVIDIA = {
    80: Target(80, 166912, 108),
    86: Target(86, 101376, 82),
    89: Target(89, 101376, 128),
    90: Target(90, 232448, 132),
    100: Target(100, 232448, 148),
    120: Target(120, 101376, 170),
}
#: MI300X, MI355X, Radeon RX 7900 XTX. AMD's data sheets and instruction set manuals: 64, 160 and 64 KiB of LDS a block.
AMD = {
    "gfx942": Target("gfx942", 65536, 304, "hip", 64),
    "gfx950": Target("gfx950", 163840, 256, "hip", 64),
    "gfx1100": Target("gfx1100", 65536, 96, "hip", 32),
}
KNOWN = NVIDIA | AMD

#: target of the interpreter: with so few multiprocessors that small tests fill them, and tiny ones don't
INTERPRETED = Target(90, 232448, 12)


def arch_named(text: str) -> int | str:
    """Return the key of KNOWN that a word of a command line names: "90" or "gfx942". Raises ValueError for others."""
    arch = int(text) if text.isdecimal() else text
    if arch not in KNOWN:
        raise ValueError(f"expected some of {', '.join(map(str, KNOWN))}; got {text}")
    return arch


def unserved(target: Target) -> str | None:
    """Why the kernels of a GPU can't run on the target; None if they can."""
    if target.backend == "hip":
        need = "matrix instructions for bfloat16 (gfx90a, gfx94x, gfx95x, gfx11xx, gfx12xx)"
        return None if _AMD_SERVED.fullmatch(str(target.arch)) else f"the kernels need {need}; the GPU is {target.name}"
    if target.arch < OLDEST_ARCH:
        return f"the kernels need sm_{OLDEST_ARCH} (A100, RTX 30) or newer; the GPU is {target.name}"
    return None


def platform() -> str:
    """Return the platform that this torch was built for: "CUDA" or "ROCm". Both call their devices "cuda"."""
    return "ROCm" if torch.version.hip else "CUDA"


def current_target(device: torch.device) -> Target:
    """Return the target of a GPU; INTERPRETED for any other device."""
    return _gpu_target(device.index) if device.type == "cuda" else INTERPRETED


@functools.cache
def _gpu_target(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    count = properties.multi_processor_count
    if torch.version.hip:  # no opt-in there: a block may have all the LDS. The name ends in features: "gfx942:xnack-"
        arch, shared = properties.gcnArchName.partition(":")[0], properties.shared_memory_per_block
        return Target(arch, shared, count, "hip", properties.warp_size)
    return Target(properties.major * 10 + properties.minor, properties.shared_memory_per_block_optin, count)
