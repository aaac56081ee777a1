"""Eager calls, checked and given a backend once for their shapes, strides, types and options.

An eager call that nobody but its implementation wants to know of goes straight to its kernel, with an autograd function
of our own where a gradient is wanted: torch's way through a registered operator costs more than all else that the host
does in such a call (docs/notes/host_time.md). Whoever traces, transforms, profiles or listens gets the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import _dispatch, _register, configs

_MOST_PLANS = 4096  # of some hundred bytes, or some thousand once they are replayed
_OPTIONS = frozenset((int, float, bool, str))

_PLANS: dict[tuple, Plan] = {}


def serve(op: str, call, backend: str | None, resolve: Callable):
    """Check, choose and run a call of the public op; `resolve` checks it and fills its defaults in."""
    backend = _dispatch.named(backend)
    key, differentiable = (None, False) if torch.compiler.is_compiling() else _key(op, call, backend)
    if key is None:
        return operator(op)(*resolve(call), backend)
    plan = _PLANS.get(key)
    if plan is not None:
        outs = plan.run(plan.resolved(call), differentiable)
    else:
        resolved = resolve(call)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(op, call, resolved, backend)
        outs = plan.run(resolved, differentiable)
    return outs if len(outs) > 1 else outs[0]


def operator(op: str, part: str = ""):
    return getattr(torch.ops.retro_kernels, op + part)


class Plan:
    """How calls of one key are served. Holds no tensor: those are
    taken from each call, wherever `resolve` moved them to.
    """

    def __init__(self, op: str, call, resolved, backend: str | None):
        self.op, self.backend, self.make = op, backend, type(resolved)
        self.module = _dispatch.choose(op, resolved, backend)
        self.repeat = _dispatch.repeat(self.module)
        self.guarded = resolved[0].is_cuda
        self.places = [resolved._fields.index(name) for name in resolved.DIFFERENTIABLE]
        self.seeded = getattr(resolved, "seed", None) is not None
        # a field is an option, or the tensor of the call that stands at `moves`
        self.options = [None if isinstance(value, Tensor) else value for value in resolved]
        self.tensors = [i for i, value in enumerate(resolved) if isinstance(value, Tensor)]
        self.seed_at = resolved._fields.index("seed") if self.seeded else None
        self.moves = [(i, _place(i, call, resolved)) for i in self.tensors if i != self.seed_at]
        self.forward = self.repeat(self._forward)
        self.backwards: dict[tuple, Callable] = {}

    def resolved(self, call):
        """The call with its tensors where they belong, and a fresh seed where it draws."""
        values = self.options.copy()
        for to, at in self.moves:
            values[to] = call[at]
        if self.seeded:
            values[self.seed_at] = _register.dropout_seed(call[0].device, 1.0)
        return self.make._make(values)

    def run(self, call, differentiable: bool) -> tuple[Tensor, ...]:
        return _Differentiable.apply(self, *call) if differentiable else self.guard(self.forward, call)

    def guard(self, run: Callable, values):
        """`run` with the call's GPU current."""
        if self.guarded and values[0].device.index != torch.cuda.current_device():
            with torch.cuda.device(values[0].device):
                return run(values)
        return run(values)

    def _forward(self, values) -> tuple[Tensor, ...]:
        return tuple([out.contiguous() for out in self.module.forward(self.make._make(values))])

    def gradients(self, saved: tuple[Tensor, ...], grads, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """saved: the call's tensors and its outputs, whose layouts are
        looked at again: a hook may have put others in their place.
        """
        layouts = [None if tensor is None else (tensor.stride(), tensor.data_ptr() & 15) for tensor in (*saved, *grads)]
        key = (needs, *layouts)
        run = self.backwards.get(key)
        if run is None:
            if len(self.backwards) >= _MOST_PLANS:
                self.backwards.clear()
            run = self.backwards[key] = self.repeat(lambda values: self._backward(values, needs))
        return self.guard(run, self.values(saved, grads))

    def values(self, saved: tuple[Tensor, ...], grads) -> list:
        """The call, its outputs and their gradients."""
        slots = [*self.options, *saved[len(self.tensors) :], *grads]
        for at, tensor in zip(self.tensors, saved):
            slots[at] = tensor
        return slots

    def _backward(self, values, needs) -> list[Tensor | None]:
        fields = len(self.options)
        count = (len(values) - fields) // 2
        call, outs, grads = self.make._make(values[:fields]), values[fields : fields + count], values[fields + count :]
        contiguous = tuple([g if g is None or _register.has_rows(g) else g.contiguous() for g in grads])
        results = self.module.backward(call, outs, contiguous, needs)
        return [grad.contiguous() if needed else None for grad, needed in zip(results, needs, strict=True)]


class _Differentiable(torch.autograd.Function):
    """What `register_autograd` does, at a quarter of its cost."""

    @staticmethod
    def forward(ctx, plan: Plan, *values):
        outs = plan.guard(plan.forward, values)
        ctx.plan = plan
        ctx.save_for_backward(*[values[at] for at in plan.tensors], *outs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[out for out in outs if not out.is_floating_point()])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        plan, saved = ctx.plan, ctx.saved_tensors
        results = [None] * (len(plan.options) + 1)
        asked = ctx.needs_input_grad
        needs = tuple([asked[at + 1] for at in plan.places])
        if not any(needs) or all([grad is None for grad in grads]):
            return tuple(results)
        if torch.is_grad_enabled() or not alone() or not all([grad is None or _plain(grad) for grad in grads]):
            values, fields = plan.values(saved, grads), len(plan.options)
            listed = iter(operator(plan.op, "_backward")(*values[:fields], plan.backend, *values[fields:], list(needs)))
            made = [next(listed) if needed else None for needed in needs]
        else:
            made = plan.gradients(saved, grads, needs)
        for at, grad in zip(plan.places, made, strict=True):
            results[at + 1] = grad
        return tuple(results)


def forget() -> None:
    """Make every plan anew: what they were made by has changed."""
    _PLANS.clear()


def _place(i: int, call, resolved) -> int:
    """Where the call has the tensor that stands at i once resolved; one tensor may be given for several arguments."""
    if call[i] is resolved[i]:
        return i
    return next(j for j, own in enumerate(call) if own is resolved[i] and resolved[j] is not own)


def _key(op: str, call, backend: str | None) -> tuple[tuple | None, bool]:
    """What checks, choice and launches depend on, None where a mode, transform, tracer or profiler wants to know of the
    call; and whether a gradient is wanted."""
    parts: list = [op, backend, configs.epoch()]
    wanted = False
    for value in call:
        if isinstance(value, Tensor):
            if not _plain(value):
                return None, False
            parts += (value.dtype, value.shape, value.stride(), value.get_device(), value.data_ptr() & 15)
            wanted = wanted or value.requires_grad
        elif value is None or value.__class__ in _OPTIONS:
            parts += (value.__class__, value)
        else:
            return None, False
    return (tuple(parts) if alone() else None), wanted and torch.is_grad_enabled()


def alone() -> bool:
    """Nobody but the implementation wants to know of a call."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
        and not torch._C._is_any_autocast_enabled()
    )


def _plain(tensor: Tensor) -> bool:
    """An ordinary tensor of the CPU or a GPU: no subclass, no lazy negation, no wrapper."""
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    return keys in _PLAIN_ON_CPU or (tensor.is_cuda and keys in _plain_keys("cuda"))


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    """Dispatch keys of ordinary tensors, of inference mode too; asked for a GPU once a tensor has been there."""
    keys = [torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()]
    with torch.inference_mode():
        keys.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)


_PLAIN_ON_CPU = _plain_keys("cpu")
