"""Triton driver whose device is the emulator: its binary is PTX, and a launch executes the PTX on CPU tensors.

Triton's launch path is unchanged: heuristics, autotuners, hooks, caches and specialisation are its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

from .kernels import Compiled
from .machines import LANES, MOST_THREADS, REGISTERS, Machine
from .program import Program

#: Triton keeps compiled kernels by device; a real one has a small number
_NUMBER = 1000
_REGISTERS = 64  # registers of a thread, for programs that compute an occupancy: ptxas alone knows the number


@functools.lru_cache(maxsize=200)  # some megabytes each
def loaded(binary: bytes):
    """The program of a PTX module; PtxError: what in it is not emulated."""
    return Program(binary.decode())


class Driver(CudaDriver):
    """The emulator as the device that Triton compiles for and launches on, and the device's utilities."""

    def __init__(self, device: Machine, launched: Callable | None = None, tensors: str = "cpu"):
        """launched: called with every launch; None: kernels are compiled only. tensors: where torch has them.

        The base's own `__init__` would look for a GPU.
        """
        self.device, self.launched, self.utils, self.tensors = device, launched, self, tensors

    def launcher_cls(self, source, metadata) -> Callable:
        """Return the function that Triton calls to launch a compiled kernel, and keeps for later drivers."""

        def launch(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments):
            if enter_hook is not None:
                enter_hook(launch_metadata)
            kernel = Compiled.of(function, source, metadata)
            triton.runtime.driver.active.launched(source, metadata, kernel, (x, y, z), arguments)
            if exit_hook is not None:
                exit_hook(launch_metadata)

        return launch

    def _nothing(self, *_) -> None:
        pass

    unload_module = set_printf_fifo_size = set_current_device = _nothing

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        """Return (module, function, registers, spills, most threads). The module is None: nothing is unloaded."""
        return None, loaded(binary), _REGISTERS, 0, MOST_THREADS

    def get_device_properties(self, device=None) -> dict[str, int]:
        return {
            "max_shared_mem": self.device.shared_memory_per_block_optin,
            "max_num_regs": REGISTERS,
            "multiprocessor_count": self.device.multi_processor_count,
            "warpSize": LANES,
            "sm_clock_rate": self.device.clock_rate,
            "mem_clock_rate": self.device.memory_clock_rate,
            "mem_bus_width": self.device.memory_bus_width,
        }

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return self.device.capability

    def get_current_device(self) -> int:
        return _NUMBER + self.device.arch

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.tensors)
