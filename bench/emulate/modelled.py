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

    machines = model.MACHINES
    if machine not in machines:
        raise ValueError(f"machine: expected one of {sorted(machines)}; got {machine!r}")
    if machines[machine].arch != launch.arch:
        raise ValueError(
            f"machine: {machine} is sm_{machines[machine].arch}; the launch was compiled for sm_{launch.arch}"
        )
    return model.estimate(copied(launch), static_record(launch), machines[machine])


def static_record(launch) -> dict[str, Any]:
    """Return the `static` part of the launch's record, from machine code, which emulation does without."""
    from ..static import tiles

    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", None):
        return tiles.static_record(launch, launch.arch)


def copied(launch):
    """Return the launch on copies of its tensors: executing it again changes nothing of the program's."""

    def copy(tensor: Tensor) -> Tensor:
        flat = tensor.detach().as_strided((elements(tensor),), (1,)).clone()
        return flat.as_strided(tensor.shape, tensor.stride(), 0)

    return replaced(launch, copy)
