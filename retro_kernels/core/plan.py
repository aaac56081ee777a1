"""Plans of calls: the first call of a layout is checked, gets its backend, and has its passes listed.

A layout is a call's shapes, strides, types, options and alignment. Later calls of the same layout bring other tensors.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from ..checks import has_rows
from . import backends
from .arguments import ANY_STRIDE, check_resolved, kept
from .steps import Pass

# both caches evict the least recently used entry
_MOST_PLANS = 4096
_MOST_BACKWARDS = 64  # of one plan

_PLANS: OrderedDict[tuple, Plan] = OrderedDict()


class Plan:
    """Plan of the calls of one key. It holds no tensor."""

    def __init__(self, op: str, call, resolved, backend: str | None, position: int | None = None):
        self.op, self.backend, self.make = op, backend, type(resolved)
        self.module = backends.choose(op, resolved, backend)
        self.listable = not self.module.__name__.endswith(".reference")
        #: value of each field that is an option, None in place of a tensor
        self.options = [None if isinstance(value, Tensor) else value for value in resolved]
        #: indices of the fields that are tensors
        self.tensors = [i for i, value in enumerate(resolved) if isinstance(value, Tensor)]
        differentiable = [resolved._fields.index(name) for name in resolved.DIFFERENTIABLE]
        #: index of each entry of DIFFERENTIABLE in `tensors`; None where the call has no such tensor
        self.places = [self.tensors.index(at) if at in self.tensors else None for at in differentiable]
        #: indices of the fields taken from each call: tensors, then the position if it moves within `positions`
        self.given, self.positions = self.tensors, range(0)
        if position is not None:
            movable = call.movable()
            free = position in movable
            self.positions = movable if free else range(position, position + 1)
            self.given = [*self.tensors, resolved._fields.index(self.make.MOVES)] if free else self.tensors
        self.moves = [_place(at, call, resolved) for at in self.given]
        self.seeded = None in self.moves
        #: indices of the outputs that a backward pass reads
        self.kept = [self.make.RETURNS.index(name) for name in kept(self.make)]
        self.forward = Pass(self._forward, self.listable)
        self.backwards: OrderedDict[tuple, Pass] = OrderedDict()
        #: layouts of the tensors of `given` and of the kept outputs, set by the first call
        self.layouts: list[tuple] | None = None
        #: (name, type, shape) of the kept outputs and all gradients, set by the first raw backward pass
        self.outputs: list[tuple] | None = None
        #: quick check that saved tensors have the layouts of the first backward pass, which was checked in full
        self.like: Callable[..., bool] | None = None

    def check_given_back(self, call, values: Sequence[Tensor | None]) -> None:
        """Raise unless the kept outputs and the gradients of all outputs have the types and shapes of the outputs."""
        if self.outputs is None:
            meta = call._make(x.to("meta") if isinstance(x, Tensor) else x for x in call)
            outs = dict(zip(call.RETURNS, meta.empty_outputs(), strict=True))
            named = [*((n, outs[n]) for n in kept(call)), *((f"grad_{n}", out) for n, out in outs.items())]
            self.outputs = [(name, out.dtype, out.shape) for name, out in named]
        for (name, dtype, shape), value in zip(self.outputs, values, strict=True):
            if value is not None and (value.dtype != dtype or value.shape != shape):
                got = f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{name}: expected {dtype} {list(shape)}; got {got}")

    def call(self, given):
        """Return the resolved call whose fields of `given` have these values."""
        values = self.options.copy()
        for at, value in zip(self.given, given):
            values[at] = value
        return self.make._make(values)

    def _forward(self, values) -> tuple[Tensor, ...]:
        return tuple([out.contiguous() for out in self.module.forward(self.call(values))])

    def gradients(self, values: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Return the gradients of the call's tensors that `needs` selects, None for the others.

        values: the call's tensors, its kept outputs, and the gradients of all outputs. Their layouts are in the key,
        because a hook may have replaced saved tensors.
        """
        key = (needs, *[None if x is None else (x.stride(), x.data_ptr() & 15) for x in values])
        found = used(self.backwards, key)
        if found is None:
            if len(self.backwards) >= _MOST_BACKWARDS:
                self.backwards.popitem(last=False)
            found = self.backwards[key] = Pass(lambda values: self._backward(values, needs), self.listable)
        return found.run(values)

    def _backward(self, values, needs: tuple[bool, ...]) -> list[Tensor | None]:
        first = len(self.tensors)
        outs, grads = values[first : first + len(self.kept)], values[first + len(self.kept) :]
        call, outs, grads = readable(self.call(values), outs, grads)
        results = [None] * first
        for at, grad in zip(self.places, self.module.backward(call, outs, grads, self.needed(needs)), strict=True):
            if at is not None and needs[at]:
                results[at] = grad.contiguous()
        return results

    def needed(self, needs: tuple[bool, ...]) -> tuple[bool, ...]:
        """Turn `needs`, one flag for each tensor, into one flag for each entry of DIFFERENTIABLE."""
        return tuple([at is not None and needs[at] for at in self.places])


def used(cache: OrderedDict, key: tuple):
    """Return the entry of a key, which becomes the most recently used one, or None."""
    found = cache.get(key)
    if found is not None:
        with contextlib.suppress(KeyError):  # another thread has evicted it
            cache.move_to_end(key)
    return found


def keep(key: tuple, plan: Plan) -> Plan:
    """Keep a plan. Where the cache is full, the least recently used one is evicted."""
    while len(_PLANS) >= _MOST_PLANS:
        _PLANS.popitem(last=False)
    _PLANS[key] = plan
    return plan


def forget() -> None:
    """Drop every plan. Call it after a change that plans do not notice."""
    _PLANS.clear()


def of_resolved(op: str, call, backend: str | None, epoch: int) -> Plan:
    """Return the plan of a resolved call of a raw operator. The first call of a layout is checked here, because sizes
    and integers become addresses and no check precedes a raw operator.
    """
    layout = [
        (x.dtype, x.shape, x.stride(), x.get_device(), x.data_ptr() & 15) if isinstance(x, Tensor) else (type(x), x)
        for x in call
    ]
    key = (op, backend, epoch, *layout)  # tuples, where an eager call's key is flat
    found = used(_PLANS, key)
    if found is None:
        check_resolved(call)
        found = keep(key, Plan(op, call, call, backend))
    return found


def _place(i: int, call, resolved) -> int | None:
    """Return the index of the field of `call` that holds field i of `resolved`; None for a seed, which each call draws.

    Field i itself comes first, because one tensor may be given for several arguments.
    """
    if call[i] is resolved[i]:
        return i
    return next((j for j, own in enumerate(call) if own is resolved[i]), None)


def readable(call, outs: Sequence[Tensor], grads: Sequence[Tensor | None]):
    """Return the values with tensors without dense rows copied, so that a backward pass can read them.

    An expanded gradient (out.sum().backward()) has no dense rows. A saved-tensor hook may return an input or output
    without them.
    """
    strided = {
        name: x.contiguous()
        for name in call.DIFFERENTIABLE
        if name not in ANY_STRIDE and (x := getattr(call, name)) is not None and not has_rows(x)
    }
    call = call._replace(**strided) if strided else call
    outs = tuple([out.contiguous() for out in outs])
    return call, outs, tuple([g if g is None or has_rows(g) else g.contiguous() for g in grads])
