"""Launches as plain values, what Triton compiles for them, and their execution on the emulator."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any
from unittest import mock

import triton

from .driver import Driver, loaded
from .kernels import Compiled
from .machines import device

#: Triton has one active driver and one hook for all threads of a process
_TRITON = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel over one grid.

    arguments: every parameter by its name, constants too; tensors may be on the meta device. options: of Triton's
    compiler, such as num_warps, num_stages and maxnreg.
    """

    kernel: Any  # the @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, launch) -> Launch:
        """Return a copy of the four fields of any object that has them."""
        if isinstance(launch, cls):
            return launch
        return cls(launch.kernel, tuple(launch.grid), dict(launch.arguments), dict(launch.options))


def until_ptx(backend=None, stages=None, *_):
    """Leave ptxas out, because the emulator executes PTX: a hook of Triton. Without arguments: part of a cache key."""
    if stages is None:
        return ("ptx as the binary", "ptx as the binary")
    stages["cubin"] = lambda module, metadata: module.encode()


def machine_code(launch, arch: int, hook=None):
    """Return what Triton compiles for a launch on a GPU of `arch`: its `asm` has "ptx" and "cubin".

    Triton's own launch path decides the types, the divisibility and the options; nothing is launched. hook: as
    `until_ptx`, which saves the time of ptxas.
    """
    with (
        _TRITON,
        mock.patch.object(triton.runtime.driver, "_active", Driver(device(arch))),
        mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", hook),
    ):
        return launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


def compiled(launch, arch: int, hook=None) -> Compiled:
    """Return the loaded kernel of a launch. Raises PtxError for an instruction that is not emulated."""
    made = machine_code(launch, arch, hook)
    return Compiled.of(loaded(made.asm["ptx"].encode()), made.src, made.metadata)


def run(
    launch,
    arch: int,
    *,
    checks: bool = True,
    only: range | None = None,
    kernel: Compiled | None = None,
    bounds: str = "tensor",
) -> Compiled:
    """Execute a launch on CPU tensors as a GPU of `arch` would.

    Args:
        launch: a `Launch`, or any object with its four fields.
        only: some CTAs of the grid, by their number, x fastest.
        bounds: "storage": an argument may access all of its tensor's storage.
        kernel: execute this kernel instead, for example one with a fault planted.

    Raises:
        EmulationError: an access out of bounds, a race, a missing wait, ...; it names the line of the kernel.
        PtxError: an instruction or a feature that is not emulated, by name.
    """
    kernel = kernel or compiled(launch, arch, until_ptx)
    values = [launch.arguments.get(name) for name in kernel.signature]
    kernel.execute(launch.grid, values, checks=checks, only=only, bounds=bounds)
    return kernel
