"""Vectorised, threaded C++ kernels; one module per op, of the same name as everywhere."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from .._problem import unfit


def missing() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    return _native.missing("_cpu")


def unsupported(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return unfit(tensors, "cpu")
