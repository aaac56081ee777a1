"""One pass of a call, recorded: its launches and torch's operations, replayed on other tensors of the same layouts.

A plan follows from shapes, strides, types, options and alignment alone, and never reads what a tensor holds. So what
one call of a layout did, later ones do again, without planning, checking or binding arguments. A position that moves
from call to call is recorded as what the plan made of it, and by what conditions (`moving`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import launcher, replay
from .moving import Moving, settled

_ACTIVE = threading.local()
_ATEN = torch.ops.aten
#: what makes memory that holds nothing yet
_FRESH = (
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
)


#: recordings of one layout: of the ways that a plan goes by its numbers
_MOST_WAYS = 4


class Repeated:
    """`function(values)`, a list of tensors, ints that move, or None: the first call as it is, for most layouts never
    return; the second recorded, and later ones that its recording does not hold for.
    """

    def __init__(self, function: Callable):
        self.function, self.replays, self.left = function, [], _MOST_WAYS + 1

    def __call__(self, values):
        for again in self.replays:
            results = again(values)
            if results is not NotImplemented:
                return results
        self.left -= 1
        if self.left == _MOST_WAYS or self.left < 0:
            return self.function(values)
        values = _apart(values)
        with Tape(values) as tape:
            results = self.function(tape.given)
        again = tape.replay(results)
        if again is None:
            self.left = 0  # a layout that can't be replayed stays as it is
        else:
            self.replays.append(again)
        return results


class Tape(TorchDispatchMode):
    """Inside, every operation and launch of this thread is noted,
    with the places of its tensors instead of the tensors.
    """

    def __init__(self, values):
        super().__init__()
        # kept, with all that is made of them: an id is one tensor's as long as it lives
        self.values, self.inputs = list(values), len(values)
        self.slots = {id(value): i for i, value in enumerate(values) if isinstance(value, Tensor)}
        #: of the numbers among the values
        self.guards: list[str] = []
        #: the values, with what records its use in place of each number
        self.given = [Moving(f"t{i}", x, self.guards) if type(x) is int else x for i, x in enumerate(values)]
        self.alive: list[Tensor] = []
        self.steps: list[replay.Step] = []
        self.replayable, self.launching = True, False

    def __enter__(self):
        _ACTIVE.tape = self
        return super().__enter__()

    def __exit__(self, *exception):
        _ACTIVE.tape = None
        return super().__exit__(*exception)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        if self.launching:  # what an interpreter or emulator does to execute a kernel
            return out
        if (
            operation is torch.ops.aten.detach.default
        ):  # torch.empty does it; the same memory, and nobody here differentiates
            self.slots[id(out)] = self._slot(args[0])
            self.alive.append(out)
            return out
        places = [(i, self._slot(arg)) for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        if operation in _FRESH and not kwargs.get("pin_memory"):
            self.steps.append(replay.made(self._put(out), out))
            return out
        nested = [x for arg in args if isinstance(arg, (list, tuple)) for x in arg]
        if any(isinstance(x, Tensor) for x in (*nested, *kwargs.values())):
            self.replayable = False
        outs = out if isinstance(out, (list, tuple)) else (out,)
        into = [self._put(x) for x in outs]
        self.steps.append(replay.Operation(operation, list(args), places, kwargs, into))
        return out

    def launch(self, launch) -> None:
        self.launching = True
        launch = _numbered(launch)
        numbers = {name: settled(value) for name, value in launch.arguments.items()}
        now = dataclasses.replace(launch, grid=tuple(settled(n) for n in launch.grid), arguments=numbers)
        try:
            compiled = now.run()
        finally:
            self.launching = False
        places = {name: self._slot(value) for name, value in launch.arguments.items() if isinstance(value, Tensor)}
        self.steps.append(launcher.Launched(launch, compiled, places))

    def replay(self, results) -> Callable | None:
        """Does the same to other tensors and gives what stands for `results`; None where something else went in."""
        slots = [None if tensor is None else self._slot(tensor) for tensor in results]
        if not self.replayable:
            return None
        return replay.function(self.steps, self.inputs, len(self.values), slots, type(results), self.guards)

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self.slots:  # from elsewhere: another call may have another
            self.replayable = False
        return self._put(tensor)

    def _put(self, value) -> int:
        """The place of a result: the tensor's own if it has one, as after an operation in place."""
        if not isinstance(value, Tensor):
            self.replayable = False  # read by the host, which may have decided by it
        if id(value) not in self.slots:
            self.slots[id(value)] = len(self.values)
            self.values.append(value)
        return self.slots[id(value)]


def _numbered(launch):
    """With numbers in place of what moves where a value becomes part of the compiled kernel: 1, a multiple of 16."""
    parts = {p.name for p in getattr(launch.kernel, "params", ()) if not p.do_not_specialize}
    fixed = {name: int(x) for name, x in launch.arguments.items() if isinstance(x, Moving) and name in parts}
    return dataclasses.replace(launch, arguments=launch.arguments | fixed) if fixed else launch


def active() -> Tape | None:
    """The tape that records this thread."""
    return getattr(_ACTIVE, "tape", None)


def _apart(values):
    """Each tensor an object of its own, as those of a later call may be, where one was given for several arguments."""
    seen: set[int] = set()
    apart = []
    for value in values:
        apart.append(value.detach() if id(value) in seen and isinstance(value, Tensor) else value)
        seen.add(id(value))
    return apart
