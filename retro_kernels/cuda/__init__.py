"""CUDA C++ kernels for what Triton can't do as well; one module per op, of the same name as everywhere."""

from __future__ import annotations

import torch

from .. import _native


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if why := _native.unavailable("_cuda"):
        return why
    return None if torch.cuda.is_available() else "no CUDA GPU"
