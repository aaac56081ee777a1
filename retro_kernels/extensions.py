"""Compiled extensions, loaded on first use, or the reason why one is absent.

`load` serves packages that build on this one too. The rest is about this package's `_cpu` and `_cuda`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import struct
import sys
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .core.arguments import CALLS

# codes of Type in csrc/view.h, which count from 1; the two tables change together
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OTHERS = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TYPE = {dtype: code for code, dtype in enumerate(_FLOATS + _OTHERS, 1)}

#: version of the bindings' arguments, which `abi` of each extension states; the numbers change together
ABI = {"_cpu": 6, "_cuda": 2}

#: id of the process that imported the package; a process with another id is a fork of it
_PROCESS = os.getpid()


@cache
def load(name: str, abi: int, needs: str) -> tuple[ModuleType | None, str | None]:
    """Return (the extension, None), or (None, why it can't be used): it is absent, damaged, or built from sources with
    another `abi`.

    name: full name of the module. needs: tools that build it, named in the reason.
    """
    try:
        spec = importlib.util.find_spec(name)
        why = _damage(Path(spec.origin)) if spec and spec.origin else None
        if why:
            return None, f"the extension {name} is damaged: {why} ({_remedy(needs)})"
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return None, f"the extension {name} was not built ({_remedy(needs)})"
    except ImportError as error:
        return None, f"the extension {name} does not load: {error}"
    if why := _stale(module, abi):
        return None, f"the extension {name} was built from other sources: {why} ({_remedy(needs)})"
    return module, None


def _damage(path: Path) -> str | None:
    """Why a file is not a whole ELF library. To map a truncated one would kill the process."""
    if not sys.platform.startswith("linux"):
        return None
    with path.open("rb") as file:
        data, size = file.read(64), path.stat().st_size
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return "not an ELF file"
    if data[4:6] != b"\x02\x01":  # 64 bits, little endian
        return None
    sections, entry_bytes, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    expected = sections + entry_bytes * count  # the section table is at the end
    return f"{size} of {expected} bytes" if size < expected else None


def _stale(module: ModuleType, expected: int) -> str | None:
    """How the extension's bindings differ from the calls of this package."""
    abi = getattr(module, "abi", None)
    if abi != expected:
        return f"its abi is {abi}, the package's {expected}"
    calls = {call.__name__: call for call in CALLS.values()}
    for problem, count in getattr(module, "fields", {}).items():
        fields = len(calls[problem]._fields)
        if count != fields:
            return f"it takes {count} fields of {problem}, the package has {fields}"
    return None


def _remedy(needs: str) -> str:
    """Say how to repair an extension, in a checkout or where the package is installed."""
    if (Path(__file__).resolve().parents[1] / "setup.py").exists():
        return f"python setup.py build_ext --inplace; needs {needs}"
    again = "install retro-kernels again from its source distribution, with pip's --no-build-isolation"
    return f"{again}; needs {needs}"


@cache
def _load(name: str) -> tuple[ModuleType | None, str | None]:
    needs = "a C++ compiler" if name == "_cpu" else "nvcc and a torch built with CUDA"
    module, why = load(f"retro_kernels.{name}", ABI[name], needs)
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
    return tensor.data_ptr(), *layout(tensor.dtype, tensor.shape, tensor.stride())


@lru_cache(4096)  # a small call passes three tensors or more
def layout(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
    """Return a view without its address."""
    return _TYPE[dtype], tuple(shape), _dense_where_one(shape, strides) if 1 in shape else strides


def _dense_where_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dense, inner = [], 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        dense.append(inner if size == 1 else stride)
        inner = size * dense[-1]
    return tuple(reversed(dense))


def cuda_unavailable() -> str | None:
    """Why this machine can't run the kernels of extension `_cuda`; None if it can."""
    if torch.version.hip:
        return f"the kernels are CUDA C++; this torch was built for ROCm {torch.version.hip}"
    if why := unavailable("_cuda"):
        return why
    return driver_too_old(*extension("_cuda").versions()) if torch.cuda.is_available() else "no CUDA GPU"


def driver_too_old(runtime: int, driver: int) -> str | None:
    """Why the driver cannot run the extension's CUDA runtime, both as 1000 major + 10 minor.

    A driver runs every minor version of its major version.
    """
    if driver // 1000 >= runtime // 1000:
        return None
    of = "CUDA {}.{}".format
    have, need = (of(version // 1000, version % 1000 // 10) for version in (driver, runtime))
    remedy = "update the driver, or build with an older CUDA"
    return f"the extension was built with {need}, the driver runs {have}: {remedy}"


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
