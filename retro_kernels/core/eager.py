"""Eager calls, checked and given a backend once for their shapes, strides, types and options.

An eager call that nobody but its implementation wants to know of goes straight to its kernel, with an autograd function
of our own where a gradient is wanted: torch's way through a registered operator costs more than all else that the host
does in such a call (docs/lab/host_time.md). Whoever traces, transforms, profiles or listens gets the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..compile import configs
from . import arguments, backends, flops, operator, transforms

_MOST_PLANS = 4096  # of some hundred bytes, or some thousand once they are replayed
_OPTIONS = frozenset((int, float, bool, str))

_PLANS: dict[tuple, Plan] = {}
_dispatch_keys = torch._C._dispatch_keys


def serve(op: str, call, backend: str | None):
    """Check, choose and run a call of the public op."""
    if torch.compiler.is_compiling():
        return operator.registered(op)(*operator.resolve(call), backends.named(backend))
    if torch._C._is_any_autocast_enabled() and unheard() and arguments.autocast_on(call[0]):
        call, device = arguments.cast(call), call[0].device.type
        torch.set_autocast_enabled(device, False)
        try:
            return _served(op, call, backend)
        finally:
            torch.set_autocast_enabled(device, True)
    return _served(op, call, backend)


def _served(op: str, call, backend: str | None):
    backend = backends.named(backend)
    key, differentiable, position = _key(op, call, backend)
    if key is None:
        return _heard(op, operator.resolve(call), backend)
    plan = _PLANS.get(key)
    if position is not None and plan is not None and position not in plan.positions:
        key = (*key, position)  # this value alone
        plan = _PLANS.get(key)
    if plan is None:
        resolved = operator.resolve(call)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(op, call, resolved, backend, position)
        values = [resolved[at] for at in plan.given]
    else:
        values = plan.values_of(call)
    outs = _Differentiable.apply(plan, *values) if differentiable else plan.guard(plan.forward, values)
    return outs if len(outs) > 1 else outs[0]


def _heard(op: str, call, backend: str | None):
    """A resolved call by the operator, for whoever listens."""
    if not transforms.active():
        flops.announce()
        return operator.registered(op)(*call, backend)
    outs = transforms.forward(op, call, backend)
    return outs if len(outs) > 1 else outs[0]


class Plan:
    """How calls of one key are served. Holds no tensor: those are taken from each call, wherever `resolve` moved them
    to, and so is a position that moves."""

    def __init__(self, op: str, call, resolved, backend: str | None, position: int | None):
        self.op, self.backend, self.make = op, backend, type(resolved)
        self.module = backends.choose(op, resolved, backend)
        self.repeat = backends.repeat(self.module)
        self.guarded = resolved[0].is_cuda
        # a field is an option, or the tensor of the call that stands at `moves`
        self.options = [None if isinstance(value, Tensor) else value for value in resolved]
        self.tensors = [i for i, value in enumerate(resolved) if isinstance(value, Tensor)]
        differentiable = [resolved._fields.index(name) for name in resolved.DIFFERENTIABLE]
        #: of each entry of DIFFERENTIABLE, its place among `tensors`; None where the call has no such tensor
        self.places = [self.tensors.index(at) if at in self.tensors else None for at in differentiable]
        self.seeded = getattr(resolved, "seed", None) is not None
        seed = resolved._fields.index("seed") if self.seeded else None
        #: what is taken from each call: its tensors, and last the position, where that moves, within `positions`
        self.given, self.positions = self.tensors, range(0)
        if position is not None:
            movable = call.movable()
            free = position in movable
            self.positions = movable if free else range(position, position + 1)
            self.given = [*self.tensors, _moving(self.make)] if free else self.tensors
        self.moves = [None if at == seed else _place(at, call, resolved) for at in self.given]
        self.forward = backends.again(self.module, resolved, self.given) or self.repeat(self._forward)
        self.backwards: dict[tuple, Callable] = {}
        #: of the tensors of `given` and of the outputs: what a backward pass relies on; known after the first call
        self.layouts: list[tuple] | None = None

    def values_of(self, call) -> list:
        """Of the call what `given` names, and a fresh seed where it draws."""
        if self.seeded:
            seed = operator.dropout_seed(call[0].device, 1.0)
            return [seed if at is None else call[at] for at in self.moves]
        return [call[at] for at in self.moves]

    def guard(self, run: Callable, values):
        """`run` with the call's GPU current."""
        if self.guarded and values[0].device.index != torch.cuda.current_device():
            with torch.cuda.device(values[0].device):
                return run(values)
        return run(values)

    def call(self, given):
        """The call of these values, resolved."""
        values = self.options.copy()
        for at, value in zip(self.given, given):
            values[at] = value
        return self.make._make(values)

    def _forward(self, values) -> tuple[Tensor, ...]:
        return tuple([out.contiguous() for out in self.module.forward(self.call(values))])

    def gradients(self, saved: tuple[Tensor, ...], grads, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """saved: the call's tensors and its outputs, whose layouts are looked at again: a hook may have put others in
        their place. The gradients of those that `needs` names."""
        values = (*saved, *grads)
        key = (needs, *[None if x is None else (x.stride(), x.data_ptr() & 15) for x in values])
        run = self.backwards.get(key)
        if run is None:
            if len(self.backwards) >= _MOST_PLANS:
                self.backwards.clear()
            run = self.backwards[key] = self.repeat(lambda values: self._backward(values, needs))
        return self.guard(run, values)

    def _backward(self, values, needs: tuple[bool, ...]) -> list[Tensor | None]:
        first = len(self.tensors)
        count = (len(values) - first) // 2
        outs, grads = values[first : first + count], values[first + count :]
        readable = operator.readable(self.call(values), outs, grads)
        results = [None] * first
        for at, grad in zip(self.places, self.module.backward(*readable, self.needed(needs)), strict=True):
            if at is not None and needs[at]:
                results[at] = grad.contiguous()
        return results

    def needed(self, needs: tuple[bool, ...]) -> tuple[bool, ...]:
        """Of each entry of DIFFERENTIABLE, where `needs` says it of each tensor."""
        return tuple([at is not None and needs[at] for at in self.places])

    def recorded(self, saved: tuple[Tensor, ...], grads, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """`gradients` by the registered operator, for whoever listens or differentiates again."""
        first, named = len(self.tensors), self.needed(needs)
        call, outs = self.call(saved), saved[first:]
        transforms.refuse_batched(self.op, grads)
        if transforms.active():
            listed = iter(transforms.backward(self.op, call, self.backend, outs, grads, named))
        else:
            listed = iter(operator.registered(self.op, "_backward")(*call, self.backend, *outs, *grads, list(named)))
        results = [None] * first
        for at, needed in zip(self.places, named):
            if needed:
                results[at] = next(listed)
        return results


class _Differentiable(torch.autograd.Function):
    """What `register_autograd` does, at a quarter of its cost: a function of the call's tensors alone."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors):
        outs = plan.guard(plan.forward, tensors)
        ctx.plan = plan
        if plan.layouts is None:
            plan.layouts = operator.layouts((*tensors, *outs))
        ctx.save_for_backward(*tensors, *outs)
        ctx.set_materialize_grads(False)
        if not outs[-1].is_floating_point():  # of topk_chunks; the last of its outputs
            ctx.mark_non_differentiable(outs[-1])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        plan, saved = ctx.plan, ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if all([grad is None for grad in grads]):
            return (None,) * (len(needs) + 1)
        names = [plan.make._fields[at] for at in plan.tensors] + ["output"] * (len(saved) - len(plan.tensors))
        operator.check_saved(plan.op, names, saved, plan.layouts)
        listens = torch.is_grad_enabled() or not alone()
        if listens or not all([grad is None or _plain(grad) for grad in grads]):
            return None, *plan.recorded(saved, grads, needs)
        return None, *plan.gradients(saved, grads, needs)


def forget() -> None:
    """Make every plan anew: what they were made by has changed."""
    _PLANS.clear()


def _place(i: int, call, resolved) -> int:
    """Where the call has the tensor that stands at i once resolved; one tensor may be given for several arguments."""
    if call[i] is resolved[i]:
        return i
    return next(j for j, own in enumerate(call) if own is resolved[i] and resolved[j] is not own)


@functools.cache
def _moving(problem: type) -> int | None:
    """Where calls of an op have the position that moves."""
    return None if problem.MOVES is None else problem._fields.index(problem.MOVES)


def _key(op: str, call, backend: str | None) -> tuple[tuple | None, bool, int | None]:
    """What checks, choice and launches depend on, None where a mode, transform, tracer or profiler wants to know of the
    call; whether a gradient is wanted; and the position, where it moves and is no part of the key."""
    parts: list = [op, backend, configs.epoch()]
    add, wanted, plain = parts.append, False, _PLAIN_ON_CPU
    if torch._C._has_torch_function(call):
        return None, False, None
    at, position, values = _moving(call.__class__), None, call
    if at is not None and call[at].__class__ is int:
        position = call[at]
        values = call[:at] + call[at + 1 :]
        add(at)
    for value in values:
        if value is None:
            add(None)
        elif isinstance(value, Tensor):
            if _dispatch_keys(value).raw_repr() not in plain and not _plain(value):
                return None, False, None
            add(value.dtype)
            add(value.shape)
            add(value.stride())
            add(value.get_device())
            add(value.data_ptr() & 15)
            wanted = wanted or value.requires_grad
        elif (kind := value.__class__) in _OPTIONS:
            add(kind)
            add(value)
        else:
            return None, False, None
    differentiable = wanted and torch.is_grad_enabled()
    if differentiable and position is not None:
        add(position)
        position = None
    return (tuple(parts) if alone() else None), differentiable, position


def alone() -> bool:
    """Nobody but the implementation wants to know of a call, and no type is changed on its way."""
    return unheard() and not torch._C._is_any_autocast_enabled()


def unheard() -> bool:
    """No mode, transform, tracer or profiler is on."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
    )


def _plain(tensor: Tensor) -> bool:
    """An ordinary tensor of the CPU or a GPU: no subclass, no lazy negation, no wrapper."""
    keys = _dispatch_keys(tensor).raw_repr()
    return keys in _PLAIN_ON_CPU or (tensor.is_cuda and keys in _plain_keys("cuda"))


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    """Dispatch keys of ordinary tensors, of inference mode too; asked for a GPU once a tensor has been there."""
    found = [_dispatch_keys(torch.empty(0, device=device)).raw_repr()]
    with torch.inference_mode():
        found.append(_dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(found)


_PLAIN_ON_CPU = _plain_keys("cpu")
