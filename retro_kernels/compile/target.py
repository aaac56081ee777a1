"""GPU that a tile is chosen or a kernel compiled for, as a plain value. Importing probes no device."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Target:
    """arch: compute capability times ten. shared_memory: bytes that a block can have at most."""

    arch: int
    shared_memory: int
    multiprocessors: int = 132


#: oldest architecture that the GPU backends serve: it introduced bfloat16 products and asynchronous copies
OLDEST_ARCH = 80

#: A100, RTX 3090 and A10, RTX 4090 and L40S, H100 SXM and H200, B200, RTX 5090. CUDA C++ Programming Guide, technical
#: specifications: 163, 99, 99, 227, 227 and 99 KiB a block.
KNOWN = {
    80: Target(80, 166912, 108),
    86: Target(86, 101376, 82),
    89: Target(89, 101376, 128),
    90: Target(90, 232448, 132),
    100: Target(100, 232448, 148),
    120: Target(120, 101376, 170),
}

#: target of the interpreter: with so few multiprocessors that small tests fill them, and tiny ones don't
INTERPRETED = Target(90, 232448, 12)


def current_target(device: torch.device) -> Target:
    """Return the target of a CUDA device; INTERPRETED for any other."""
    return _cuda_target(device.index) if device.type == "cuda" else INTERPRETED


@functools.cache
def _cuda_target(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    arch = properties.major * 10 + properties.minor
    return Target(arch, properties.shared_memory_per_block_optin, properties.multi_processor_count)
