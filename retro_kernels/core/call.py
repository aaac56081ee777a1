"""The way of an eager call: check, autograd, operator. And the one body of every backward pass.

A call is checked once for each layout (`layouts`). An operator of torch's dispatcher then takes it if modes, tracers,
transforms, a profiler or unusual tensors must be served; an ordinary call goes straight to the implementation of that
operator. Eager calls have an autograd function of their own, because the one in `transforms`, which also serves the raw
operators, takes 100 us more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import arguments, dispatch, flops, layouts, private

#: implementation of each operator for tensors on the CPU or a GPU; `operator.register` adds them
IMPLEMENTATIONS: dict[str, Callable] = {}


def serve(op: str, call, backend: str | None):
    """Serve a call of the public op: check it, choose its backend and run it."""
    backend, raw = dispatch.named(backend), operator(op)
    if torch.compiler.is_compiling():
        return raw(*resolve(call), backend)
    flops.announce()
    call = arguments.cast(call)
    layout = None if torch.jit.is_tracing() else layouts.key(call)  # in a trace, sizes are tensors
    if layout is None or torch.overrides.has_torch_function(call) or private.transformed():
        return raw(*resolve(call), backend)
    call = _seeded(layouts.checked(op, call, layout))
    if torch.is_grad_enabled() and any([x.requires_grad for x in call if isinstance(x, Tensor)]):
        outs = _Eager.apply(op, backend, call.__class__, *call)
        return outs if len(outs) > 1 else outs[0]
    return run(op, (*call, backend))


def resolve(call):
    """Return the call checked, in autocast's types, with defaults filled in and, with dropout, a new seed."""
    return _seeded(arguments.cast(call).checked())


def _seeded(call):
    return call.seeded() if getattr(call, "dropout_p", 0) else call


def operator(name: str):
    """Return the registered operator of an op, or of its backward pass."""
    return getattr(torch.ops.retro_kernels, name)


def run(name: str, values: tuple):
    """Run an operator below autograd. Skip torch's dispatcher if it would only call the implementation."""
    if private.undisturbed(values):
        return IMPLEMENTATIONS[name](*values)
    with private.below_autograd():
        return operator(name)(*values)


class _Eager(torch.autograd.Function):
    """Autograd function of eager calls. `torch.func` refuses it, and forward mode needs another."""

    @staticmethod
    def forward(ctx, op: str, backend: str | None, make: type, *fields):
        outs = run(op, (*fields, backend))
        outs = outs if isinstance(outs, tuple) else (outs,)
        save(ctx, op, backend, make, fields, outs)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        return gradients(ctx, grads, _by_operator)


def save(ctx, op: str, backend: str | None, make: type, fields: Sequence, outs: Sequence[Tensor]) -> list:
    """Save the values that `gradients` reads. Return the call's tensors, with None for each of its options."""
    ctx.op, ctx.backend, ctx.make = op, backend, make
    ctx.options = [None if isinstance(x, Tensor) else x for x in fields]
    tensors = [x if isinstance(x, Tensor) else None for x in fields]
    saved = *tensors, *[outs[make.RETURNS.index(name)] for name in arguments.kept(make)]
    ctx.described = _described(saved)
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)
    if not outs[-1].is_floating_point():  # the indices of topk_chunks
        ctx.mark_non_differentiable(outs[-1])
    return tensors


def saved(ctx, tensors: Sequence[Tensor | None]):
    """Return the call and the outputs, from the tensors that `save` saved for reverse or forward mode."""
    call = ctx.make(*[option if x is None else x for x, option in zip(tensors, ctx.options)])
    return call, tensors[len(ctx.options) :]


def gradients(ctx, grads: Sequence[Tensor | None], run: Callable) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of an autograd function: None for op, backend and class, then one per field
    of the call.

    run: (op, call, backend, outputs, gradients of the outputs, needs) -> the gradients that `needs` selects
    """
    make, needs = ctx.make, ctx.needs_input_grad[3:]
    results: list[Tensor | None] = [None] * (3 + len(needs))
    places = [make._fields.index(name) for name in make.DIFFERENTIABLE]
    wanted = [needs[place] for place in places]
    if all([grad is None for grad in grads]) or not any(wanted):
        return tuple(results)
    tensors = ctx.saved_tensors  # read once: torch's checkpointing refuses a second time
    call, outs = saved(ctx, tensors)
    _check_saved(ctx.op, (*make._fields, *arguments.kept(make)), tensors, ctx.described)
    if any([grad is not None and private.is_batched(grad) for grad in grads]):  # no custom operator can unbatch them
        remedy = "torch.func.vmap over torch.func.vjp is"
        raise NotImplementedError(f"retro_kernels.{ctx.op}: is_grads_batched is not implemented; {remedy}")
    found = iter(run(ctx.op, call, ctx.backend, outs, grads, wanted))
    for place, needed in zip(places, wanted):
        if needed:
            results[3 + place] = next(found)
    return tuple(results)


def _by_operator(op: str, call, backend: str | None, outs, grads, needs: list[bool]) -> Sequence[Tensor]:
    """Return gradients by the registered operator."""
    if getattr(call, "TWICE", False) and torch.is_grad_enabled():
        return _by_definition(op, call, grads, needs)
    values = *call, backend, *outs, *grads, needs
    if torch.is_grad_enabled() or private.transformed():
        return operator(f"{op}_backward")(*values)
    return run(f"{op}_backward", values)


def _by_definition(op: str, call, grads, needs: list[bool]) -> tuple[Tensor, ...]:
    """Return gradients that can be differentiated again: those that autograd makes of the reference."""
    inputs = [getattr(call, name) for name, needed in zip(call.DIFFERENTIABLE, needs) if needed]
    outs = dispatch.module(op, "reference").forward(call)
    outs, grads = zip(*[(out, grad) for out, grad in zip(outs, grads) if grad is not None])
    return torch.autograd.grad(outs, inputs, grads, create_graph=True)


def _described(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    return [None if x is None else (x.dtype, x.shape, x.device, x.layout) for x in tensors]


def _check_saved(op: str, names: Sequence[str], found: Sequence[Tensor | None], expected: list[tuple | None]) -> None:
    """Raise where a saved-tensor hook returned a tensor of another type, shape, device or layout."""
    if (got := _described(found)) == expected:
        return
    name, now, was = next(three for three in zip(names, got, expected, strict=True) if three[1] != three[2])
    now, was = (f"{dtype} {list(shape)} on {device} ({layout})" for dtype, shape, device, layout in (now, was))
    raise RuntimeError(f"retro_kernels.{op}: a saved-tensor hook returned {name} as {now}; it was saved as {was}")
