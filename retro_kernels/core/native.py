"""The compiled extensions, loaded on first use, or the reason why one is absent."""

from __future__ import annotations

import importlib
import importlib.util
import os
import struct
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .arguments import CALLS

# the codes of csrc/view.h: Type; the two tables change together
_TYPE = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.int16: 7,
    torch.int8: 8,
    torch.uint8: 9,
}

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

#: what the bindings take, as they state it in `abi`; the numbers change together
ABI = {"_cpu": 4, "_cuda": 2}

#: the process that imported the package; another one that loads an extension was forked from it
_PROCESS = os.getpid()


@cache
def _load(name: str) -> tuple[ModuleType | None, str | None]:
    needs = "a C++ compiler" if name == "_cpu" else "nvcc and a torch built with CUDA"
    module, why = load(f"retro_kernels.{name}", ABI[name], needs)
    try:
        if module and name == "_cpu":
            module.isa_name()  # reads the environment
            module.watch_forks(_PROCESS)
    except ValueError as error:
        return None, f"RETRO_KERNELS_ISA: {error}"
    return module, why


@cache
def load(name: str, abi: int, needs: str) -> tuple[ModuleType | None, str | None]:
    """The extension of that full name, or why it can't be used: absent, damaged, or built from other sources, whose
    `abi` differs.

    needs: what building it takes, for the reason.
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
    """Why a file is no whole ELF library: mapping one that was cut short, as by a full disk, would kill the process."""
    if not sys.platform.startswith("linux"):
        return None
    data, size = path.open("rb").read(64), path.stat().st_size
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return "no ELF file"
    if data[4:6] != b"\x02\x01":  # 64 bits, little endian
        return None
    sections, entry_bytes, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    expected = sections + entry_bytes * count  # the table of sections comes last
    return f"{size} of {expected} bytes" if size < expected else None


def _stale(module: ModuleType, expected: int) -> str | None:
    """How the extension's bindings differ from what this package calls."""
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
    """What to do about an extension that can't be used, in a checkout or where the package is installed."""
    if (Path(__file__).resolve().parents[2] / "setup.py").exists():
        return f"python setup.py build_ext --inplace; needs {needs}"
    again = "install retro-kernels again from its source distribution, with pip's --no-build-isolation"
    return f"{again}, where there is {needs}"


def unavailable(name: str) -> str | None:
    """Why extension `_cpu` or `_cuda` can't be used; None if it can."""
    return _load(name)[1]


def extension(name: str) -> ModuleType:
    """Extension `_cpu` or `_cuda`. Raises RuntimeError with the reason where it is absent."""
    module, why = _load(name)
    if module is None:
        raise RuntimeError(why)
    return module


def view(tensor: Tensor | None) -> View | None:
    """What C++ sees of a tensor: address, type code, sizes, strides. The caller keeps the tensor alive.

    A dimension of size 1 gets the stride of dense memory: torch lets it be anything, and kernels step by strides to
    where their first element would lie.
    """
    if tensor is None:
        return None
    shape, strides = tuple(tensor.shape), tensor.stride()
    return tensor.data_ptr(), _TYPE[tensor.dtype], shape, _dense_where_one(shape, strides) if 1 in shape else strides


def _dense_where_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dense, inner = [], 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        dense.append(inner if size == 1 else stride)
        inner = size * dense[-1]
    return tuple(reversed(dense))


def cpu_isa() -> str:
    """The instruction set whose CPU kernels run on this machine, or "none" without the extension."""
    return "none" if unavailable("_cpu") else extension("_cpu").isa_name()


def cuda_built() -> str:
    """The architectures that the CUDA extension was compiled for and its CUDA version, or why there is no extension."""
    if why := unavailable("_cuda"):
        return why
    made = extension("_cuda")
    runtime, _ = made.versions()
    arches = ", ".join(f"sm_{arch}" for arch in made.architectures.split(","))
    return f"{arches}; CUDA {runtime // 1000}.{runtime % 1000 // 10}"
