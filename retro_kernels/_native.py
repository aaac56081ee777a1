"""The compiled extensions, loaded on first use, or the reason why one is absent."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

# the codes of csrc/view.h: Type; the two tables change together
_TYPE = {
    torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4,
    torch.int64: 5, torch.int32: 6, torch.int16: 7, torch.int8: 8, torch.uint8: 9,
}  # fmt: skip

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@cache
def _load(name: str) -> tuple[ModuleType | None, str | None]:
    try:
        module = importlib.import_module(f"retro_kernels.{name}")
        if name == "_cpu":
            module.isa_name()  # reads the environment
        return module, None
    except ModuleNotFoundError:
        return None, f"the extension retro_kernels.{name} was not built ({_remedy(name)})"
    except ImportError as error:
        return None, f"the extension retro_kernels.{name} does not load: {error}"
    except ValueError as error:
        return None, f"RETRO_KERNELS_ISA: {error}"


def _remedy(name: str) -> str:
    """What to do about an extension that was not built, in a checkout or where the package is installed."""
    needs = "a C++ compiler" if name == "_cpu" else "nvcc and a torch built with CUDA"
    if (Path(__file__).resolve().parent.parent / "setup.py").exists():
        return f"python setup.py build_ext --inplace; needs {needs}"
    return f"install retro-kernels again from its source distribution, with pip's --no-build-isolation, where there is {needs}"


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
    """What C++ sees of a tensor: address, type code, sizes, strides. The caller keeps the tensor alive."""
    if tensor is None:
        return None
    return tensor.data_ptr(), _TYPE[tensor.dtype], tuple(tensor.shape), tensor.stride()


def cpu_isa() -> str:
    """The instruction set whose CPU kernels run on this machine, or "none" without the extension."""
    return "none" if unavailable("_cpu") else extension("_cpu").isa_name()


def problem(call) -> tuple:
    """What C++ sees of a call: its fields in order, tensors as views; none of those with a default, which it has yet to learn."""
    known = call[: len(call) - len(call._field_defaults)]
    return tuple(view(x) if isinstance(x, Tensor) else x for x in known)
