"""GPUs by their data sheets: the devices that Triton compiles for, and the machines whose times are estimated."""

from __future__ import annotations

import dataclasses

LANES = 32  # threads per warp
REGISTERS, SCHEDULERS = 65536, 4  # per SM
MOST_THREADS = 1024  # per block
RESERVED_SHARED_BYTES = 1024  # the system takes this of every block
REGISTER_GRAIN, WARP_REGISTER_GRAIN = 8, 256  # registers are allocated in multiples: per thread, per warp
MUFU_RESULTS, SHARED_BYTES = 16.0, 128.0  # per cycle and SM: special functions, shared memory
COPY = 0.88  # share of the data sheet's memory rate that a copy reaches

#: architecture -> bytes of shared memory that one block may have, and the blocks and threads that an SM takes at once
LIMITS = {
    80: (166912, 32, 2048),
    86: (101376, 16, 1536),
    89: (101376, 24, 1536),
    90: (232448, 32, 2048),
    100: (232448, 32, 2048),
    120: (101376, 24, 1536),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU. Sources: NVIDIA's data sheets, and the technical specifications in the CUDA C++ Programming Guide."""

    name: str
    title: str  # of torch's properties, without "NVIDIA"
    arch: int
    multi_processor_count: int
    total_memory: int  # bytes
    L2_cache_size: int
    clock_rate: int  # kHz
    memory_clock_rate: int
    memory_bus_width: int  # bits
    tensor_flops: int  # dense FLOPs per cycle and SM: half types, float32 sums
    memory: float  # bytes per second
    load_clock: int | None = None  # kHz under load, if they are fewer

    @property
    def hertz(self) -> float:
        return 1e3 * (self.load_clock or self.clock_rate)

    @property
    def hbm(self) -> float:
        """Bytes per second that a copy reaches."""
        return COPY * self.memory

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.arch, 10)

    @property
    def shared_memory_per_block_optin(self) -> int:
        """Bytes that one block may have."""
        return LIMITS[self.arch][0]

    @property
    def properties(self) -> dict[str, object]:
        """Return the attributes of `torch.cuda.get_device_properties`, and others."""
        shared, blocks, threads = LIMITS[self.arch]
        return vars(self) | {
            "name": f"NVIDIA {self.title}",
            "major": self.capability[0],
            "minor": self.capability[1],
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_block_optin": shared,
            "shared_memory_per_multiprocessor": shared + RESERVED_SHARED_BYTES,
            "regs_per_multiprocessor": REGISTERS,
            "blocks_per_multiprocessor": blocks,
            "max_threads_per_multi_processor": threads,
            "max_threads_per_block": MOST_THREADS,
            "warp_size": LANES,
            "is_integrated": 0,
            "is_multi_gpu_board": 0,
            "gcnArchName": "",
        }


#: name -> machine
MACHINES = {
    one.name: one
    for one in (
        Machine("A100", "A100-SXM4-80GB", 80, 108, 80 << 30, 40 << 20, 1410000, 1593000, 5120, 2048, 2.039e12),
        Machine("RTX 3090", "GeForce RTX 3090", 86, 82, 24 << 30, 6 << 20, 1695000, 9751000, 384, 512, 0.936e12),
        Machine("L40S", "L40S", 89, 142, 48 << 30, 96 << 20, 2520000, 9001000, 384, 1024, 0.864e12),
        Machine("RTX 4090", "GeForce RTX 4090", 89, 128, 24 << 30, 72 << 20, 2520000, 10501000, 384, 512, 1.008e12),
        Machine("H100", "H100 80GB HBM3", 90, 132, 80 << 30, 50 << 20, 1980000, 2619000, 5120, 4096, 3.35e12, 1755000),
        Machine("H200", "H200", 90, 132, 141 << 30, 50 << 20, 1980000, 3201000, 6144, 4096, 4.8e12, 1755000),
        Machine("B200", "B200", 100, 148, 180 << 30, 126 << 20, 1965000, 3996000, 8192, 8192, 8.0e12, 1850000),
        Machine("RTX 5090", "GeForce RTX 5090", 120, 170, 32 << 30, 96 << 20, 2407000, 14001000, 512, 512, 1.792e12),
    )
}
#: architecture -> the machine that Triton sees: the last one above
DEVICES = {one.arch: one for one in MACHINES.values()}


def device(arch: int) -> Machine:
    """Return the machine of an architecture. Raises ValueError for an unknown one."""
    if arch not in DEVICES:
        raise ValueError(f"arch: expected one of {sorted(DEVICES)}; got {arch!r}")
    return DEVICES[arch]


def machine(name: str) -> Machine:
    """Return a machine by its name. Raises ValueError for an unknown one."""
    if name not in MACHINES:
        raise ValueError(f"machine: expected one of {', '.join(MACHINES)}; got {name!r}")
    return MACHINES[name]
