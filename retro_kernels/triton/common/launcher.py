"""A launch that is made again and again: without Triton's binder,
which costs more than the launch, where its version is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import triton
from torch import Tensor

#: first and last version whose compiled kernels are called as
#: `_Bound` does (read in their sources, and compared by a test)
KNOWN_VERSIONS = ((3, 6), (3, 9))


def known() -> bool:
    return KNOWN_VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= KNOWN_VERSIONS[1]


def step(launch, compiled, places: dict[str, int]) -> Callable[[list], None]:
    """Launches on `values` what `launch` was on its own tensors, those named in `places` taken from there.

    compiled: what Triton made of it, for arguments of these types and this alignment; None under the interpreter.
    """
    anew = _anew(launch, places)
    bindable = (
        compiled is not None and known() and hasattr(compiled, "packed_metadata") and not launch.kernel.pre_run_hooks
    )
    return _Bound(launch, compiled, places, anew) if bindable else anew


def _anew(launch, places: dict[str, int]) -> Callable[[list], None]:
    """By the launch's own way."""

    def run(values: list) -> None:
        arguments = launch.arguments | {name: values[slot] for name, slot in places.items()}
        dataclasses.replace(launch, arguments=arguments).run()

    options = {name: None if isinstance(value, Tensor) else value for name, value in launch.arguments.items()}
    launch = dataclasses.replace(launch, arguments=options)  # holds no tensor
    return run


class _Bound:
    """A compiled kernel with all its arguments but the addresses."""

    def __init__(self, launch, compiled, places: dict[str, int], anew: Callable[[list], None]):
        from triton.runtime import driver

        names = launch.kernel.arg_names
        self.arguments = [None if name in places else launch.arguments[name] for name in names]
        self.addresses = [(names.index(name), slot) for name, slot in places.items()]
        self.grid = (*launch.grid, 1, 1)[:3]
        self.launch, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.device, self.stream = driver.active.get_current_device(), driver.active.get_current_stream
        self.anew, self.hooks = anew, triton.knobs.runtime

    def __call__(self, values: list) -> None:
        hooks = self.hooks
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            return self.anew(values)
        arguments = self.arguments.copy()
        for at, slot in self.addresses:
            arguments[at] = values[slot].data_ptr()
        self.launch(*self.grid, self.stream(self.device), self.function, self.metadata, None, None, None, *arguments)
        return None
