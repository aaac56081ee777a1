"""One pass of a call as data: a list of steps over slots, made once for a layout and run by one loop.

A backend's pass (`forward` or `backward`) runs on meta tensors, which have shapes and strides and no memory. It
allocates outputs and scratch memory, calls compiled functions (`call`), launches kernels, and may use torch's
operations. Each of these becomes a step, and each tensor a slot. To run the list, real tensors are put into the slots.
A position that moves from call to call is a slot too: `derived` computes numbers from it, and `decided` branches on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..compile import triton_private
from . import native, private, recycled

_MOST_WAYS = 4  # lists kept for one layout, the newest ones; each belongs to other decisions about the position
_EMPTY, _TORCH, _NATIVE, _LAUNCH = range(4)  # kinds of steps
_VALUE, _VIEW, _NUMBER, _CALL, _ASKED = range(5)  # kinds of a compiled function's arguments
_ATEN = torch.ops.aten
_FRESH = (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default)
_FRESH += (_ATEN.new_empty.default, _ATEN.new_empty_strided.default)
_SAME = (_ATEN.detach.default, _ATEN.alias.default)  # operations whose result shares the argument's slot
_ACTIVE = threading.local()
#: arguments of a compiled function that are read at each call: number of threads, current stream of the GPU
THREADS, STREAM = torch.get_num_threads, lambda: torch.cuda.current_stream().cuda_stream


class Seen(NamedTuple):
    """A tensor's memory under other sizes and strides, for a compiled function."""

    tensor: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def layout(self) -> tuple:
        """Return the C++ view without the address."""
        return native.layout(self.tensor.dtype, self.shape, self.strides)


def rows(x: Tensor) -> Seen:
    """View a contiguous x [...,K] as a matrix."""
    width = x.shape[-1]
    return Seen(x, (x.numel() // width, width), (width, 1))


def flat(x: Tensor) -> Seen:
    """View a contiguous x as a vector."""
    return Seen(x, (x.numel(),), (1,))


class Position:
    """Symbolic position: its slot, and its value in the call that is being listed."""

    def __init__(self, listing: Listing, slot: int, value: int):
        self.listing, self.slot, self.value = listing, slot, value


def derived(position: int | Position, function: Callable[[int], int]) -> int | Position:
    """Return `function(position)`; each run of the list computes it again."""
    if not isinstance(position, Position):
        return function(position)
    return position.listing.number(position, function)


def decided(position: int | Position, function: Callable[[int], object]):
    """Return `function(position)` and record it as a guard: a call with another result gets another list."""
    if not isinstance(position, Position):
        return function(position)
    value = function(position.value)
    position.listing.guards.append((position.slot, function, value))
    return value


def active() -> Listing | None:
    """Return the listing that is open in this thread, or None."""
    return getattr(_ACTIVE, "listing", None)


class Listing(private.DispatchMode):
    """Context in which operations on meta tensors, compiled functions and launches become steps; nothing runs."""

    def __init__(self, values):
        super().__init__()
        self.steps: list[tuple] = []
        self.guards: list[tuple[int, Callable, object]] = []
        self.numbers: list[tuple[int, int, Callable]] = []
        self.slots: dict[int, int] = {}
        self.alive: list = []  # keeps the keys of `slots` valid: an id is unique while its object lives
        self.device = values[0].device
        self.given = [self._twin(value) for value in values]

    def __enter__(self):
        _ACTIVE.listing = self
        return super().__enter__()

    def __exit__(self, *exception):
        _ACTIVE.listing = None
        return super().__exit__(*exception)

    def _twin(self, value):
        """Return the stand-in of an input: a meta tensor of the same layout and alignment, or a `Position`."""
        if isinstance(value, Tensor):
            extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) + 1
            offset = (value.data_ptr() & 15) // value.element_size()
            memory = torch.empty(extent + offset, dtype=value.dtype, device="meta")
            value = memory.as_strided(value.shape, value.stride(), offset)
        elif value is not None:
            value = Position(self, len(self.alive), value)
        self._put(value)
        return value

    def _put(self, value) -> int:
        """Return the slot of a result: a new one, or the tensor's own after an operation in place."""
        if id(value) not in self.slots or value is None:
            self.slots[id(value)] = len(self.alive)
            self.alive.append(value)
        return self.slots[id(value)]

    def number(self, position: Position, function: Callable[[int], int]) -> Position:
        made = Position(self, len(self.alive), function(position.value))
        self._put(made)
        self.numbers.append((made.slot, position.slot, function))
        return made

    def _slot(self, value) -> int:
        if id(value) not in self.slots:
            raise RuntimeError("a backend's pass may use only the call's tensors and tensors made from them")
        return self.slots[id(value)]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        out = operation(*args, **kwargs)
        if operation in _SAME:
            self.slots[id(out)] = self._slot(args[0])
            self.alive.append(out)
        elif operation in _FRESH:
            self.steps.append((_EMPTY, self._put(out), tuple(out.shape), out.stride(), out.dtype, out.nbytes))
        else:
            moves = [(i, self._slot(arg)) for i, arg in enumerate(args) if isinstance(arg, Tensor)]
            at_device = kwargs.pop("device", None) is not None
            outs = [self._put(x) for x in (out if isinstance(out, (list, tuple)) else (out,))]
            rest = [None if isinstance(arg, Tensor) else arg for arg in args]
            self.steps.append((_TORCH, outs, operation, rest, moves, kwargs, at_device))
        return out

    def native(self, library: str, name: str, arguments: tuple) -> None:
        """Add a call of a compiled function."""
        self.steps.append((_NATIVE, getattr(native.extension(library), name), name, self._template(arguments)))

    def _template(self, arguments: tuple) -> list[tuple]:
        made = []
        for value in arguments:
            if isinstance(value, Tensor):
                made.append((_VIEW, self._slot(value), native.view(value)[1:]))
            elif isinstance(value, Seen):
                made.append((_VIEW, self._slot(value.tensor), value.layout()))
            elif isinstance(value, Position):
                made.append((_NUMBER, value.slot, None))
            elif isinstance(value, tuple):
                made += [*self._template(value), (_CALL, len(value), None)]
            else:
                made.append((_ASKED if callable(value) else _VALUE, None, value))
        return made

    def launch(self, launch, bound: Callable[[list], None]) -> None:
        """Add a launch of a Triton kernel. bound: runs it with arguments in the kernel's order."""
        fixed = triton_private.specialised(launch.kernel)
        given = [(name, launch.arguments[name]) for name in launch.kernel.arg_names]
        arguments = [decided(x, int) if isinstance(x, Position) and name in fixed else x for name, x in given]
        moves = [(i, self._slot(x)) for i, x in enumerate(arguments) if isinstance(x, (Tensor, Position))]
        rest = [None if isinstance(x, (Tensor, Position)) else x for x in arguments]
        self.steps.append((_LAUNCH, bound, rest, moves))


class _Way:
    """List of steps for one set of decisions."""

    def __init__(self, listing: Listing, results):
        self.steps = listing.steps
        self.guards, self.numbers = listing.guards, listing.numbers
        self.blank = [None] * (len(listing.alive) - len(listing.given))
        self.kind = type(results)
        self.results = [None if x is None else listing._slot(x) for x in results]


class Pass:
    """A pass of calls of one layout.

    function: takes tensors, None and at most one position, which is last; returns tensors and None. listable: if False,
    `function` runs on the values themselves, as the reference needs for autograd.
    """

    def __init__(self, function: Callable, listable: bool):
        self.function, self.listable, self.ways = function, listable, []

    def _listed(self, values) -> _Way:
        with Listing(values) as listing:
            results = self.function(listing.given)
        way = _Way(listing, results)
        self.ways = [way, *self.ways[: _MOST_WAYS - 1]]
        return way

    def run(self, values):
        """Return the pass's results for these values."""
        if not self.listable:
            return self.function(values)
        for way in self.ways:
            if not way.guards or all([function(values[slot]) == value for slot, function, value in way.guards]):
                break
        else:
            way = self._listed(values)
        device = values[0].device
        at = [*values, *way.blank]
        for slot, source, function in way.numbers:
            at[slot] = function(at[source])
        empty = private.EMPTY[device.type]
        for step in way.steps:
            kind = step[0]
            if kind == _EMPTY:
                _, slot, shape, strides, dtype, size = step
                large = size >= recycled.FROM and device.type == "cpu"
                at[slot] = recycled.empty(shape, dtype) if large else empty(shape, strides, dtype)
            elif kind == _LAUNCH:
                _, launched, rest, moves = step
                arguments = rest.copy()
                for i, slot in moves:
                    arguments[i] = at[slot]
                launched(arguments)
            elif kind == _NATIVE:
                _, function, name, template = step
                if error := function(*_filled(template, at)):
                    raise RuntimeError(f"{name}: CUDA error {error} at launch")
            else:
                _, slots, operation, rest, moves, options, at_device = step
                arguments = rest.copy()
                for i, slot in moves:
                    arguments[i] = at[slot]
                out = operation(*arguments, **options, device=device) if at_device else operation(*arguments, **options)
                for slot, value in zip(slots, out if isinstance(out, (list, tuple)) else (out,)):
                    at[slot] = value
        return way.kind([None if slot is None else at[slot] for slot in way.results])


def _filled(template: list[tuple], at: list) -> list:
    """Return the arguments of a compiled function, with the tensors and numbers of `at`."""
    arguments = []
    for kind, slot, value in template:
        if kind == _VIEW:
            value = (at[slot].data_ptr(), *value)
        elif kind == _CALL:  # the last `slot` arguments
            value = tuple(arguments[-slot:])
            del arguments[-slot:]
        elif kind == _NUMBER:
            value = at[slot]
        elif kind == _ASKED:
            value = value()
        arguments.append(value)
    return arguments


def call(library: str, name: str, *arguments) -> None:
    """Call a compiled function or, while a pass is listed, add the call to the list.

    Tensors are passed as views, an op's call as a tuple.
    """
    listing = active()
    if listing is not None:
        listing.native(library, name, arguments)
    elif error := getattr(native.extension(library), name)(*map(_now, arguments)):
        raise RuntimeError(f"{name}: CUDA error {error} at launch")


def _now(value):
    """Return an argument of a compiled function."""
    if isinstance(value, Tensor):
        return native.view(value)
    if isinstance(value, Seen):
        return value.tensor.data_ptr(), *value.layout()
    if isinstance(value, tuple):
        return tuple(map(_now, value))
    return value() if callable(value) else value


def device_of(tensor: Tensor) -> torch.device:
    """Return the device on which a pass will run. While it is listed, its tensors are on the meta device."""
    listing = active()
    return tensor.device if listing is None else listing.device
