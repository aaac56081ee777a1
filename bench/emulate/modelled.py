"""Time estimate of a recorded launch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import triton
from torch import Tensor

from .memory import elements, replaced


def estimate(launch, machine: str):
    """`static.estimate.estimate` of a `context.Launched`, on copies of its tensors."""
    from ..static import estimate as model

    if machine not in model.MACHINES:
        raise ValueError(f"machine: expected one of {sorted(model.MACHINES)}; got {machine!r}")
    arch = model.MACHINES[machine].arch
    if arch != launch.arch:
        raise ValueError(f"machine: {machine} is sm_{arch}; the launch was compiled for sm_{launch.arch}")

    def copy(tensor: Tensor) -> Tensor:  # executing the launch again changes nothing of the program's
        flat = tensor.detach().as_strided((elements(tensor),), (1,)).clone()
        return flat.as_strided(tensor.shape, tensor.stride(), 0)

    return model.estimate(replaced(launch, copy), static_record(launch), model.MACHINES[machine])


def static_record(launch) -> dict[str, Any]:
    """Return the `static` part of the launch's record, from machine code, which emulation does without."""
    from ..static import tiles

    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", None):
        return tiles.static_record(launch, launch.arch)
