"""The compiled extensions, loaded on first use, or the reason why one is absent."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from .. import extensions

# codes of Type in csrc/view.h, which count from 1; the two tables change together
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OTHERS = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TYPE = {dtype: code for code, dtype in enumerate(_FLOATS + _OTHERS, 1)}

#: version of the bindings' arguments, which `abi` of each extension states; the numbers change together
ABI = {"_cpu": 6, "_cuda": 2}

#: id of the process that imported the package; a process with another id is a fork of it
_PROCESS = os.getpid()


@cache
def _load(name: str) -> tuple[ModuleType | None, str | None]:
    needs = "a C++ compiler" if name == "_cpu" else "nvcc and a torch built with CUDA"
    module, why = extensions.load(f"retro_kernels.{name}", ABI[name], needs)
    try:
        if module and name == "_cpu":
            module.isa_name()  # raises where RETRO_KERNELS_ISA is invalid
            module.watch_forks(_PROCESS)
    except ValueError as error:
        return None, f"RETRO_KERNELS_ISA: {error}"
    return module, why


def unavailable(name: str) -> str | None:
    """Why extension `_cpu` or `_cuda` can't be used; None if it can."""
    return _load(name)[1]


def extension(name: str) -> ModuleType:
    """Return extension `_cpu` or `_cuda`. Raises RuntimeError with the reason where it is absent."""
    module, why = _load(name)
    if module is None:
        raise RuntimeError(why)
    return module


def view(tensor: Tensor | None) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
    """Return address, type code, sizes and strides of a tensor, for C++. The caller keeps the tensor alive.

    A dimension of size 1 gets the stride of dense memory, because torch allows it any stride and kernels compute
    addresses from strides.
    """
    if tensor is None:
        return None
    return tensor.data_ptr(), *layout(tensor.dtype, tuple(tensor.shape), tensor.stride())


def layout(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
    """Return a view without its address."""
    return _TYPE[dtype], tuple(shape), _dense_where_one(shape, strides) if 1 in shape else strides


def _dense_where_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dense, inner = [], 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        dense.append(inner if size == 1 else stride)
        inner = size * dense[-1]
    return tuple(reversed(dense))


def cpu_isa() -> str:
    """Return the instruction set of the CPU kernels on this machine, or "none" without the extension."""
    return "none" if unavailable("_cpu") else extension("_cpu").isa_name()


def cuda_built() -> str:
    """Return the architectures and the CUDA version of the CUDA extension, or the reason why it is missing."""
    if why := unavailable("_cuda"):
        return why
    made = extension("_cuda")
    runtime, _ = made.versions()
    arches = ", ".join(f"sm_{arch}" for arch in made.architectures.split(","))
    return f"{arches}; CUDA {runtime // 1000}.{runtime % 1000 // 10}"
