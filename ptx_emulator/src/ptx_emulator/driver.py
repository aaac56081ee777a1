"""Triton driver whose device is the emulator: its binary is PTX, and a launch executes the PTX on CPU tensors.

Triton's launch path is unchanged: heuristics, autotuners, hooks, caches and specialisation are its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .kernels import Compiled
from .machines import Device
from .program import Program

#: Triton keeps compiled kernels by device; a real one has a small number
_NUMBER = 1000
_REGISTERS = 64  # registers of a thread, for programs that compute an occupancy: ptxas alone knows the number


@functools.lru_cache(maxsize=200)  # some megabytes each
def loaded(binary: bytes):
    """The program of a PTX module; PtxError: what in it is not emulated."""
    return Program(binary.decode())


class Launcher:
    """Callable that Triton uses to launch a compiled kernel."""

    def __init__(self, source, metadata):
        self.source, self.metadata = source, metadata

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments):
        if enter_hook is not None:
            enter_hook(launch_metadata)
        kernel = Compiled.of(function, self.source, self.metadata)
        triton.runtime.driver.active.launched(self.source, self.metadata, kernel, (x, y, z), arguments)
        if exit_hook is not None:
            exit_hook(launch_metadata)


class Driver(DriverBase):
    """The emulator as the device that Triton compiles for and launches on, and the device's utilities."""

    launcher_cls = Launcher

    def __init__(self, device: Device, launched: Callable | None = None, tensors: str = "cpu"):
        """launched: called with every launch; None: kernels are compiled only. tensors: where torch has them."""
        super().__init__()
        self.device, self.launched, self.utils, self.tensors = device, launched, self, tensors

    def _nothing(self, *_) -> None:
        pass

    unload_module = set_printf_fifo_size = set_current_device = clear_cache = _nothing

    @classmethod
    def is_active(cls) -> bool:
        return False

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        """Return (module, function, registers, spills, most threads). The module is None: nothing is unloaded."""
        return None, loaded(binary), _REGISTERS, 0, self.device.max_threads_per_block

    def get_device_properties(self, device=None) -> dict[str, int]:
        return {
            "max_shared_mem": self.device.shared_memory_per_block_optin,
            "max_num_regs": self.device.regs_per_multiprocessor,
            "multiprocessor_count": self.device.multi_processor_count,
            "warpSize": self.device.warp_size,
            "sm_clock_rate": self.device.clock_rate,
            "mem_clock_rate": self.device.memory_clock_rate,
            "mem_bus_width": self.device.memory_bus_width,
        }

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.arch, 32)

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return self.device.capability

    def get_current_device(self) -> int:
        return _NUMBER + self.device.arch

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.tensors)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(kind)

    def get_benchmarker(self):
        """Nothing is timed: every configuration that runs is as good as another."""

        def once(call, *, quantiles=None, **_):
            call()
            return [0.0] * len(quantiles) if quantiles else 0.0

        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)
