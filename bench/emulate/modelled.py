"""Time estimate of a recorded launch."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import triton
from torch import Tensor


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
    """Return the launch on copies of its tensors, each copied once, so that executing it again changes nothing of the
    program's.
    """
    copies: dict[int, Tensor] = {}

    def copy(value):
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) if value.numel() else 0
            flat = value.detach().as_strided((size,), (1,)).clone()
            copies[id(value)] = flat.as_strided(value.shape, value.stride(), 0)
        return copies[id(value)]

    return dataclasses.replace(launch, arguments={name: copy(value) for name, value in launch.arguments.items()})
