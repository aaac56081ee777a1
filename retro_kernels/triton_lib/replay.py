"""What a tape has noted, as one function of other tensors: Python without a loop, each number of it a constant.

Memory that only launches see is one allocation, cut by address. docs/lab/host_time.md has what each step saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from . import launcher
from .moving import Moving, condition

_APART = 256  # bytes between starts of scratch memory: whatever alignment a kernel was compiled for


@dataclasses.dataclass(frozen=True)
class Made:
    """Fresh memory like `size`, `strides`, `dtype`, `device`, in the place `slot`."""

    slot: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, values: list) -> None:
        values[self.slot] = torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize  # it is dense


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of torch's operations: `places` are (argument, slot) of its tensors, `into` the slots of its results."""

    operation: Callable
    arguments: list
    places: list[tuple[int, int]]
    options: dict
    into: list[int]

    def __call__(self, values: list) -> None:
        given = self.arguments.copy()
        for i, slot in self.places:
            given[i] = values[slot]
        out = self.operation(*given, **self.options)
        for slot, value in zip(self.into, out if isinstance(out, (list, tuple)) else (out,)):
            values[slot] = value


Step = Made | Operation | launcher.Launched


def function(
    steps: Sequence[Step], given: int, room: int, results: list[int | None], kind: type, guards: list[str]
) -> Callable:
    """`f(values)`: with the first `given` of `room` places filled by `values`, a `kind` of what then stands in
    `results`; NotImplemented where a guard does not hold of the values."""
    launches = [step for step in steps if isinstance(step, launcher.Launched)]
    stepwise = _stepwise(steps, given, room, results, kind, guards)
    if not all(launch.bindable() for launch in launches):
        return stepwise
    return _Source(steps, given, results, kind, guards).function(stepwise)


def _stepwise(steps, given: int, room: int, results, kind: type, guards: list[str]) -> Callable:
    """Launches go Triton's way, so that whoever has hooked them hears of each."""
    holds = condition(guards, given)

    def again(values):
        if not holds(values):
            return NotImplemented
        at = [*values, *[None] * (room - given)]
        for step in steps:
            step(at)
        return kind([None if slot is None else at[slot] for slot in results])

    return again


class _Source:
    """The function's lines, and what its names stand for."""

    def __init__(self, steps: Sequence[Step], given: int, results: list[int | None], kind: type, guards: list[str]):
        self.names: dict[str, object] = {}
        self.lines: list[str] = []
        self.addresses: dict[int, str] = {}  # slot -> what stands for its address
        seen = {slot for step in steps if isinstance(step, Operation) for slot in _touched(step)}
        scratch = [s for s in steps if isinstance(s, Made) and s.slot not in seen and s.slot not in results]
        self._arguments(given)
        if guards:
            self.lines.append(f"if not ({' and '.join(guards)}): return NotImplemented")
        self._scratch(scratch)
        for step in steps:
            if step not in scratch:
                {Made: self._made, Operation: self._operation, launcher.Launched: self._launch}[type(step)](step)
        found = "".join("None, " if slot is None else f"t{slot}, " for slot in results)
        self.lines.append(f"return [{found}]" if kind is list else f"return ({found})")

    def function(self, slowly: Callable) -> Callable:
        hooks = self._named(triton.knobs.runtime)
        body = [
            "def replay(values):",
            f"if {hooks}.launch_enter_hook.calls or {hooks}.launch_exit_hook.calls:",
            f"    return {self._named(slowly)}(values)",
            *self.lines,
        ]
        exec(compile("\n    ".join(body), "<replay>", "exec"), self.names)
        return self.names["replay"]

    def _named(self, value) -> str:
        """How a line says `value`: a number as it is, anything else by a name."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        if isinstance(value, Moving):
            return value.expression
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _arguments(self, given: int) -> None:
        if given:
            self.lines.append("".join(f"t{slot}, " for slot in range(given)) + "= values")

    def _scratch(self, steps: list[Made]) -> None:
        """One allocation for all, on each device."""
        at = 0
        for step in steps:
            self.addresses[step.slot] = f"w + {at}"
            at += -(-max(step.bytes, 1) // _APART) * _APART
        if steps:
            self._allocate("scratch", Made(-1, (at,), (1,), torch.uint8, steps[0].device))
            self.lines.append("w = scratch.data_ptr()")

    def _made(self, step: Made) -> None:
        self._allocate(f"t{step.slot}", step)

    def _allocate(self, name: str, step: Made) -> None:
        # what torch's own compiler allocates with: half the time of torch.empty
        direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{step.device.type}", None)
        empty = torch.empty_strided if direct is None else direct
        size, strides, dtype = (self._named(value) for value in (step.size, step.strides, step.dtype))
        rest = f"dtype={dtype}, device={self._named(step.device)}" if direct is None else dtype
        self.lines.append(f"{name} = {self._named(empty)}({size}, {strides}, {rest})")

    def _operation(self, step: Operation) -> None:
        tensors = dict(step.places)
        given = [f"t{tensors[i]}" if i in tensors else self._named(x) for i, x in enumerate(step.arguments)]
        given += [f"{name}={self._named(value)}" for name, value in step.options.items()]
        into = "".join(f"t{slot}, " for slot in step.into)
        into = into if len(step.into) > 1 else f"t{step.into[0]}"
        self.lines.append(f"{into} = {self._named(step.operation)}({', '.join(given)})")

    def _launch(self, step: launcher.Launched) -> None:
        from triton.runtime import driver

        if "stream = " not in "".join(self.lines):
            number = driver.active.get_current_device()
            self.lines.append(f"stream = {self._named(driver.active.get_current_stream)}({number})")
        compiled, launch = step.compiled, step.launch
        own = [
            self._address(step.places[name]) if name in step.places else self._named(launch.arguments[name])
            for name in launch.kernel.arg_names
        ]
        grid = [self._named(n) for n in (*launch.grid, 1, 1)[:3]]
        between = [self._named(x) for x in (compiled.function, compiled.packed_metadata)]
        given = [*grid, "stream", *between, "None", "None", "None", *own]
        self.lines.append(f"{self._named(compiled.run)}({', '.join(given)})")

    def _address(self, slot: int) -> str:
        if slot not in self.addresses:
            self.addresses[slot] = f"p{slot}"
            self.lines.append(f"p{slot} = t{slot}.data_ptr()")
        return self.addresses[slot]


def _touched(step: Operation) -> list[int]:
    return [*step.into, *(slot for _, slot in step.places)]


def made(slot: int, tensor: Tensor) -> Made:
    return Made(slot, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
