"""Fused Triton kernels; one module per op, of the same name as everywhere, and `_*.py` for what ops share."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from .. import _problem


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted() or torch.cuda.is_available():
        return None
    return "no CUDA GPU (TRITON_INTERPRET=1 interprets the kernels on CPU tensors, for tests)"


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return _problem.unsupported_tensors(tensors, "cpu" if interpreted() else "cuda")
