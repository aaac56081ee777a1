"""Functions that the Triton kernels of several ops share, and their host side."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ..compile.target import current_target, platform, unserved
from ..core import arguments

#: whether Triton's interpreter computes with bfloat16 correctly; the tests set it after they mended the interpreter
INTERPRETS_BFLOAT16 = False
MAX_GRID = 65535  # limit of CUDA and HIP on the second and third grid dimension


def unsupported_grid(**sizes: int) -> str | None:
    """Why the sizes can't be dimensions of a grid; None if they can."""
    return next((f"{name}={size} exceeds {MAX_GRID}" for name, size in sizes.items() if size > MAX_GRID), None)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_type() -> str:
    """Return the device type of the tensors that the backend takes."""
    return "cpu" if interpreted() else "cuda"


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return f"no {platform()} GPU (TRITON_INTERPRET=1 interprets the kernels on CPU tensors, for tests)"
    found = [current_target(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    reasons = [unserved(target) for target in found]
    return None if None in reasons else reasons[-1]


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """Why no kernel of this backend can read the tensors; None if it can."""
    if why := arguments.unsupported_tensors(tensors, device_type()):
        return why
    if interpreted() and not INTERPRETS_BFLOAT16:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype == torch.bfloat16:
                return f"{name} is torch.bfloat16, whose bits Triton's interpreter takes for integers; use float32"
    devices = {tensor.device for tensor in tensors.values() if tensor is not None}
    return next(filter(None, (unserved(current_target(device)) for device in devices)), None)


def unsupported_rows(spans: dict[str, tuple[Tensor | None, int, int]]) -> str | None:
    """Why 32-bit offsets from the first row cannot address every row; None if they can.

    spans: name -> (tensor, dimension, rows).
    """
    for name, (tensor, dimension, rows) in spans.items():
        if tensor is not None and beyond(tensor, dimension, rows):
            return f"{name}: {rows} rows, {tensor.stride(dimension)} elements apart, span 2**31 elements or more"
    return None


def beyond(tensor: Tensor, dimension: int, rows: int) -> bool:
    """Whether 32-bit offsets from the first of `rows` rows, or of all if they are fewer, do not reach the last."""
    return (min(rows, tensor.shape[dimension]) - 1) * tensor.stride(dimension) >= 2**31
