"""Eager calls, by an autograd function of our own.

An eager call goes straight to its plan unless a tracer, a transform, a dispatch mode or the profiler is active: then it
goes through the registered operator. torch's dispatch of a registered operator takes longer than the rest of the host's
work in such a call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..compile import configs
from . import arguments, backends, flops, operator, private, transforms
from . import plan as plans
from .plan import Plan, forget, keep

_OPTIONS = frozenset((int, float, bool, str))
#: classes that the values of an ordinary call have
ORDINARY = _OPTIONS | {Tensor, torch.nn.Parameter, type(None)}
__all__ = ["forget", "serve", "serve_or_torch"]


def serve(op: str, call, backend: str | None):
    """Serve a call of the public op: check it, choose its backend and run it."""
    if torch.compiler.is_compiling():
        return operator.registered(op)(*operator.resolve(call), backends.named(backend))
    if private.autocast() and private.unheard() and arguments.autocast_on(call[0]):
        call, device = arguments.cast(call), call[0].device.type
        torch.set_autocast_enabled(device, False)
        try:
            return serve(op, call, backend)
        finally:
            torch.set_autocast_enabled(device, True)
    if backend is None:
        backend = backends.named(None) if backends._open else None
    elif backend.__class__ is not str or backend not in backends.ORDER:
        backends.named(backend)  # it raises
    key, differentiable, position = _key(op, call, backend)
    if key is None:
        return _by_operator(op, operator.resolve(call), backend)
    plan = plans._PLANS.get(key)
    if position is not None and plan is not None and position not in plan.positions:
        key = (*key, position)  # a plan of this position alone
        plan = plans._PLANS.get(key)
    if plan is None:
        resolved = operator.resolve(call)
        plan = keep(key, Plan(op, call, resolved, backend, position))
        values = [resolved[at] for at in plan.given]
    else:
        try:  # noqa: SIM105, a context manager takes longer
            plans._PLANS.move_to_end(key)
        except KeyError:  # another thread has evicted the plan
            pass
        values = [None if at is None else call[at] for at in plan.moves]
        if plan.seeded:
            values[plan.moves.index(None)] = operator.dropout_seed(call[0].device, 1.0)
    if differentiable:
        outs = _Differentiable.apply(plan, *values)
    elif values[0].is_cuda:
        with operator._on_device(values[0]):
            outs = plan.forward.run(values)
    else:
        outs = plan.forward.run(values)
    return outs if len(outs) > 1 else outs[0]


def serve_or_torch(op: str, call, function):
    """Serve a call of the public op without a named backend: by torch's own `function`, unless a kernel is faster.

    The default of `use_backend` serves the call if it can.
    """
    if not private.watched(call, ORDINARY):
        default = backends.named(None) if backends._open else None
        if backends.kernel_is_faster(op, call) if default is None else backends.serves(op, default, call):
            return serve(op, call, None)
    try:
        if not torch.compiler.is_compiling() and call.strict():
            return function(*call)
    except (AttributeError, RuntimeError, TypeError):  # torch's message names no argument; that of a check does
        operator.resolve(call)
        raise
    return function(*operator.resolve(call))


def _by_operator(op: str, call, backend: str | None):
    """Serve a resolved call by the registered operator, for modes and transforms."""
    flops.announce()
    return operator.registered(op)(*call, backend)


def _gradients_by_operator(plan: Plan, saved: tuple[Tensor, ...], grads, needs: tuple[bool, ...]):
    """Return the gradients by the registered operator: for modes, transforms and second derivatives."""
    first, named = len(plan.tensors), plan.needed(needs)
    call, outs = plan.call(saved), saved[first:]
    transforms.refuse_batched(plan.op, grads)
    if getattr(call, "TWICE", False) and torch.is_grad_enabled():
        listed = iter(_by_definition(plan.op, call, grads, named))
    else:
        registered = operator.registered(plan.op, "_backward")
        listed = iter(registered(*call, plan.backend, *outs, *grads, list(named)))
    results = [None] * first
    for at, needed in zip(plan.places, named):
        if needed:
            results[at] = next(listed)
    return results


def _by_definition(op: str, call, grads, named: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Return gradients that can be differentiated again: those that autograd makes of the reference."""
    inputs = [getattr(call, name) for name, needed in zip(call.DIFFERENTIABLE, named) if needed]
    outs = backends.module(op, "reference").forward(call)
    outs, grads = zip(*[(out, grad) for out, grad in zip(outs, grads) if grad is not None])
    return torch.autograd.grad(outs, inputs, grads, create_graph=True)


class _Differentiable(torch.autograd.Function):
    """Autograd function of a call's tensors. It takes a quarter of the time of `register_autograd`."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors):
        if tensors[0].is_cuda:
            with operator._on_device(tensors[0]):
                outs = plan.forward.run(tensors)
        else:
            outs = plan.forward.run(tensors)
        ctx.plan = plan
        kept = [outs[at] for at in plan.kept]
        if plan.layouts is None:
            plan.layouts = transforms.layouts((*tensors, *kept))
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        if not outs[-1].is_floating_point():  # the indices of topk_chunks
            ctx.mark_non_differentiable(outs[-1])
        return outs

    @staticmethod
    def backward(ctx, *grads):
        plan, saved = ctx.plan, ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if all([grad is None for grad in grads]):
            return (None,) * (len(needs) + 1)
        if plan.like is None or not plan.like(*saved):
            names = [plan.make._fields[at] for at in plan.tensors] + ["output"] * (len(saved) - len(plan.tensors))
            transforms.check_saved(plan.op, names, saved, plan.layouts)
            plan.like = plan.like or private.like(saved)
        plain = all([g is None or private.dispatch_keys(g).raw_repr() in _PLAIN or _plain(g) for g in grads])
        if torch.is_grad_enabled() or not plain or private.autocast() or not private.unheard():
            return None, *_gradients_by_operator(plan, saved, grads, needs)
        if not saved[0].is_cuda:
            return None, *plan.gradients((*saved, *grads), needs)
        with operator._on_device(saved[0]):
            return None, *plan.gradients((*saved, *grads), needs)


@functools.cache
def _moving(problem: type) -> int | None:
    """Return the index of the field that holds the moving position, or None."""
    return problem._fields.index(problem.MOVES) if hasattr(problem, "MOVES") else None


def _key(op: str, call, backend: str | None) -> tuple[tuple | None, bool, int | None]:
    """Return (key of the plan, whether a gradient is wanted, the moving position if the key lacks it).

    The key is None where a mode, transform, tracer or profiler is active. It is flat and unambiguous: each value adds
    None, five parts of a tensor or two of an option.
    """
    parts: list = [op, backend, configs._epoch]
    add, wanted, plain = parts.append, False, _PLAIN
    if torch.overrides.has_torch_function(call):
        return None, False, None
    at, position, values = _moving(call.__class__), None, call
    if at is not None and call[at].__class__ is int:
        position = call[at]
        values = call[:at] + call[at + 1 :]
    for value in values:
        if value is None:
            add(None)
        elif isinstance(value, Tensor):
            if private.dispatch_keys(value).raw_repr() not in plain and not _plain(value):
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
    return (tuple(parts) if private.unheard() else None), differentiable, position


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one of the CPU or a GPU: no subclass, no lazy negation, no wrapper."""
    if tensor.is_cuda:
        _PLAIN.update(_plain_keys("cuda"))
    return private.dispatch_keys(tensor).raw_repr() in _PLAIN


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    """Return the dispatch keys of ordinary tensors of a device, inside inference mode and outside."""
    found = [private.dispatch_keys(torch.empty(0, device=device)).raw_repr()]
    with torch.inference_mode():
        found.append(private.dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(found)


#: dispatch keys of ordinary tensors on the CPU and, once a call had a tensor there, on GPUs
_PLAIN = set(_plain_keys("cpu"))
