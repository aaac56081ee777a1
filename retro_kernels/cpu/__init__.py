"""Vectorised, threaded C++ kernels; one module per op, of the same name as everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def missing() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    return _native.missing("_cpu")


def unsupported(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses: tensors off the CPU, other types, mixed types, a strided last dimension."""
    expected = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        expected = expected or tensor.dtype
        if tensor.device.type != "cpu":
            return f"{name} is on {tensor.device}, not on the CPU"
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}; have float32, bfloat16, float16"
        if tensor.dtype != expected:
            return f"{name} is {tensor.dtype} among {expected}"
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None
