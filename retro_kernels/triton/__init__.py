"""Fused Triton kernels; one module per op, of the same name as everywhere, and `_*.py` for what ops share."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted() or torch.cuda.is_available():
        return None
    return "no CUDA GPU (TRITON_INTERPRET=1 interprets the kernels on CPU tensors, for tests)"


def unsupported(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses: tensors off the device, other types, mixed types, a strided last dimension."""
    device, expected = "cpu" if interpreted() else "cuda", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        expected = expected or tensor.dtype
        if tensor.device.type != device:
            return f"{name} is on {tensor.device}, not on a {device} device"
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}; have float32, bfloat16, float16"
        if tensor.dtype != expected:
            return f"{name} is {tensor.dtype} among {expected}"
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None
