"""GPUs by their data sheets: the devices that Triton compiles for, and the machines whose times are estimated."""

from __future__ import annotations

import dataclasses

LANES = 32  # threads per warp
REGISTERS, SCHEDULERS = 65536, 4  # per SM
RESERVED_SHARED_BYTES = 1024  # the system takes this of every block
REGISTER_GRAIN, WARP_REGISTER_GRAIN = 8, 256  # registers are allocated in multiples: per thread, per warp
COPY = 0.88  # share of the data sheet's memory rate that a copy reaches


@dataclasses.dataclass(frozen=True)
class Device:
    """Properties of a GPU, by torch's names where torch has one.

    Sources: NVIDIA's data sheets, and the technical specifications in the CUDA C++ Programming Guide.
    """

    name: str
    arch: int
    multi_processor_count: int
    shared_memory_per_block_optin: int  # bytes that one block may have
    total_memory: int
    L2_cache_size: int
    clock_rate: int  # kHz
    memory_clock_rate: int
    memory_bus_width: int  # bits
    blocks_per_multiprocessor: int
    tensor_flops: int  # dense FLOPs per cycle and SM: half types, float32 sums
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block: int = 48 << 10
    regs_per_multiprocessor: int = REGISTERS
    max_threads_per_block: int = 1024
    warp_size: int = LANES
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.arch, 10)

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        return self.shared_memory_per_block_optin + RESERVED_SHARED_BYTES

    @property
    def warps_per_multiprocessor(self) -> int:
        return self.max_threads_per_multi_processor // self.warp_size


_A100 = ("NVIDIA A100-SXM4-80GB", 80, 108, 166912, 80 << 30, 40 << 20, 1410000, 1593000, 5120)
_RTX_3090 = ("NVIDIA GeForce RTX 3090", 86, 82, 101376, 24 << 30, 6 << 20, 1695000, 9751000, 384)
_RTX_4090 = ("NVIDIA GeForce RTX 4090", 89, 128, 101376, 24 << 30, 72 << 20, 2520000, 10501000, 384)
_H200 = ("NVIDIA H200", 90, 132, 232448, 141 << 30, 50 << 20, 1980000, 3201000, 6144)
_B200 = ("NVIDIA B200", 100, 148, 232448, 180 << 30, 126 << 20, 1965000, 3996000, 8192)
_RTX_5090 = ("NVIDIA GeForce RTX 5090", 120, 170, 101376, 32 << 30, 96 << 20, 2407000, 14001000, 512)

#: architecture -> the device that Triton sees
DEVICES = {
    one.arch: one
    for one in (
        Device(*_A100, 32, 2048),
        Device(*_RTX_3090, 16, 512, 1536),
        Device(*_RTX_4090, 24, 512, 1536),
        Device(*_H200, 32, 4096),
        Device(*_B200, 32, 8192),
        Device(*_RTX_5090, 24, 512, 1536),
    )
}


def device(arch: int) -> Device:
    """Return the device of an architecture. Raises ValueError for an unknown one."""
    if arch not in DEVICES:
        raise ValueError(f"arch: expected one of {sorted(DEVICES)}; got {arch!r}")
    return DEVICES[arch]


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU for the time estimate. Rates are per cycle and SM unless they say seconds."""

    name: str
    arch: int
    multiprocessors: int
    hertz: float  # under load
    memory: float  # bytes per second
    tensor: float  # FLOPs of half types, float32 sums
    l2: int  # bytes of the cache
    mufu: float = 16.0  # results
    shared: float = 128.0  # bytes

    @property
    def hbm(self) -> float:
        """Bytes per second that a copy reaches."""
        return COPY * self.memory


#: name -> machine: SMs, clock under load, memory rate, tensor FLOPs per cycle and SM, L2, by NVIDIA's data sheets
MACHINES = {
    one.name: one
    for one in (
        Machine("A100", 80, 108, 1.41e9, 2.039e12, 2048, 40 << 20),
        Machine("RTX 4090", 89, 128, 2.52e9, 1.008e12, 512, 72 << 20),
        Machine("L40S", 89, 142, 2.52e9, 0.864e12, 1024, 96 << 20),
        Machine("H100", 90, 132, 1.755e9, 3.35e12, 4096, 50 << 20),
        Machine("H200", 90, 132, 1.755e9, 4.8e12, 4096, 50 << 20),
        Machine("B200", 100, 148, 1.85e9, 8.0e12, 8192, 126 << 20),
        Machine("RTX 5090", 120, 170, 2.407e9, 1.792e12, 512, 96 << 20),
    )
}


def machine(name: str) -> Machine:
    """Return a machine by its name. Raises ValueError for an unknown one."""
    if name not in MACHINES:
        raise ValueError(f"machine: expected one of {', '.join(MACHINES)}; got {name!r}")
    return MACHINES[name]
