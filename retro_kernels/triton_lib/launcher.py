"""A launch that is made again and again: without Triton's binder, which costs more than the launch, where its version
is known."""

from __future__ import annotations

import dataclasses

import triton
from torch import Tensor

from . import moving

#: first and last version whose compiled kernels are called as `replay` does (read in their sources, and compared by a
#: test)
KNOWN_VERSIONS = ((3, 6), (3, 9))


def known() -> bool:
    return KNOWN_VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= KNOWN_VERSIONS[1]


class Launched:
    """A launch without its tensors.

    launch: as it was, with numbers that move as `Moving`; compiled: what Triton made of it, for arguments of these
    types and this alignment, None under its interpreter; places: where `values` hold the tensors.
    """

    def __init__(self, launch, compiled, places: dict[str, int]):
        options = {name: None if isinstance(value, Tensor) else value for name, value in launch.arguments.items()}
        self.launch, self.places, self.compiled = dataclasses.replace(launch, arguments=options), places, compiled

    def __call__(self, values: list) -> None:
        """By the launch's own way."""
        numbers = {name: moving.evaluated(value, values) for name, value in self.launch.arguments.items()}
        arguments = numbers | {name: values[slot] for name, slot in self.places.items()}
        grid = tuple(moving.evaluated(n, values) for n in self.launch.grid)
        dataclasses.replace(self.launch, grid=grid, arguments=arguments).run()

    def bindable(self) -> bool:
        """Whether the compiled kernel may be called past Triton."""
        return (
            self.compiled is not None
            and known()
            and hasattr(self.compiled, "packed_metadata")
            and not self.launch.kernel.pre_run_hooks
        )
