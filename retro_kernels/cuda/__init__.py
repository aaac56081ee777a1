"""CUDA C++ kernels for what Triton can't do as well; one module per op, of the same name as everywhere."""

from __future__ import annotations

import torch

from .. import _native


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if why := _native.unavailable("_cuda"):
        return why
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    return driver_too_old(*_native.extension("_cuda").versions())


def driver_too_old(runtime: int, driver: int) -> str | None:
    """Why the driver cannot run the CUDA runtime that the extension carries, both as 1000 major + 10 minor.

    A driver runs every minor version of its major version.
    """
    if driver // 1000 >= runtime // 1000:
        return None
    of = "CUDA {}.{}".format
    have, need = (of(version // 1000, version % 1000 // 10) for version in (driver, runtime))
    return (
        f"the extension was built with {need}, the driver runs {have}: update the driver, or build with an older CUDA"
    )
