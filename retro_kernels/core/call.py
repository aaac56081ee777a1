"""Eager calls, which pass checks, autograd and an operator; and the body that all backward passes share.

The first call of a layout (`layouts`) is checked, and its backend is chosen. Later calls go straight to the
implementation of the operator. An operator of torch's dispatcher takes a call if modes, tracers, transforms, a profiler
or unusual tensors must be served. Eager calls have an autograd function of their own, because the one in `transforms`,
which also serves the raw operators, takes 100 us more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import arguments, dispatch, flops, layouts, private

#: implementation of each operator for tensors on the CPU or a GPU; `operator.register` adds them
IMPLEMENTATIONS: dict[str, Callable] = {}


def serve(op: str, call, backend: str | None):
    """Serve a call of the public op: check it, choose its backend and run it."""
    backend = dispatch.named(backend)
    if torch.compiler.is_compiling():
        return operator(op)(*resolve(call), backend)
    call = arguments.cast(call)
    plain = private.undisturbed() and not torch.overrides.has_torch_function(call)
    layout = layouts.key(call) if plain else None
    if layout is None:
        flops.announce()
        return operator(op)(*resolve(call), backend)

    def first() -> layouts.Known:
        resolved = call.checked()
        chosen = dispatch.choose_backend(op, resolved, backend)
        return layouts.Known(backend=chosen, layout=layout, sources=layouts.sources(call, resolved))

    known = layouts.once(("public", op, backend), layout, first)
    call = _seeded(layouts.filled(call, known["sources"]))
    if torch.is_grad_enabled() and any([x.requires_grad for x in call if isinstance(x, Tensor)]):
        outs = _Eager.apply(op, backend, known, *call)
        return outs if len(outs) > 1 else outs[0]
    return run(op, (*call, backend), known)


def resolve(call):
    """Return the call checked, in autocast's types, with defaults filled in and, with dropout, a new seed."""
    return _seeded(arguments.cast(call).checked())


def _seeded(call):
    return call.seeded() if getattr(call, "dropout_p", 0) else call


def operator(name: str):
    """Return the registered operator of an op, or of its backward pass."""
    return getattr(torch.ops.retro_kernels, name)


def run(name: str, values: tuple, known: layouts.Known):
    """Run an operator on plain tensors: by its implementation, or by the operator itself if a profiler must see it."""
    if private.profiled():
        return operator(name)(*values)
    return IMPLEMENTATIONS[name](*values, known=known)


class _Eager(torch.autograd.Function):
    """Autograd function of eager calls. `torch.func` refuses it, and forward mode needs another."""

    @staticmethod
    def forward(ctx, op: str, backend: str | None, known: layouts.Known, *fields):
        outs = run(op, (*fields, backend), known)
        outs = outs if isinstance(outs, tuple) else (outs,)
        save(ctx, op, backend, fields, outs, known)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        return gradients(ctx, grads)


def save(ctx, op: str, backend: str | None, fields, outs, known: layouts.Known | None = None) -> list:
    """Save the values that `gradients` reads. Return the call's tensors, with None for each of its options.

    known: the stored values of an eager call.
    """
    make = arguments.CALLS[op]
    ctx.op, ctx.backend, ctx.make, ctx.known = op, backend, make, known
    ctx.twice = getattr(make, "TWICE", False)
    ctx.options = [None if isinstance(x, Tensor) else x for x in fields]
    tensors = [x if isinstance(x, Tensor) else None for x in fields]
    saved = *tensors, *[outs[make.RETURNS.index(name)] for name in arguments.kept(make)]
    ctx.described = _described(saved) if known is None else known.once("saved", lambda: _described(saved))
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)
    if not outs[-1].is_floating_point():  # the indices of topk_chunks
        ctx.mark_non_differentiable(outs[-1])
    return tensors


def saved(ctx, tensors: Sequence[Tensor | None]):
    """Return the call and the outputs, from the tensors that `save` saved for reverse or forward mode."""
    call = ctx.make(*[option if x is None else x for x, option in zip(tensors, ctx.options)])
    return call, tensors[len(ctx.options) :]


def gradients(ctx, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of an autograd function. Its last arguments are the fields of the call."""
    op, make = ctx.op, ctx.make
    results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    before = len(results) - len(make._fields)
    places = [before + make._fields.index(name) for name in make.DIFFERENTIABLE]
    needs = [ctx.needs_input_grad[place] for place in places]
    if all([grad is None for grad in grads]) or not any(needs):
        return tuple(results)
    tensors = ctx.saved_tensors  # read once: torch's checkpointing refuses a second time
    call, outs = saved(ctx, tensors)
    values = *call, ctx.backend, *outs, *grads, needs
    plain = ctx.known is not None and private.undisturbed() and not torch.is_grad_enabled()
    layout = layouts.key((*tensors, *grads)) if plain else None

    def first() -> layouts.Known:
        _check_saved(ctx, tensors)
        return arguments.known_backward(op, call, (*outs, *grads), ctx.backend)

    if layout is not None:
        known = layouts.once((op, "backward", ctx.backend), (ctx.known["layout"], layout), first)
        found = run(f"{op}_backward", values, known)
    else:
        _check_saved(ctx, tensors)
        if any([grad is not None and private.is_batched(grad) for grad in grads]):  # operators can't unbatch them
            remedy = "torch.func.vmap over torch.func.vjp is"
            raise NotImplementedError(f"retro_kernels.{op}: is_grads_batched is not implemented; {remedy}")
        twice = ctx.twice and torch.is_grad_enabled()
        found = _by_definition(op, call, grads, needs) if twice else operator(f"{op}_backward")(*values)
    for place, grad in zip(itertools.compress(places, needs), found, strict=True):
        results[place] = grad
    return tuple(results)


def _by_definition(op: str, call, grads, needs: list[bool]) -> tuple[Tensor, ...]:
    """Return gradients that can be differentiated again: those that autograd makes of the reference."""
    inputs = [getattr(call, name) for name, needed in zip(call.DIFFERENTIABLE, needs) if needed]
    outs = dispatch.module(op, "reference").forward(call)
    outs, grads = zip(*[(out, grad) for out, grad in zip(outs, grads) if grad is not None])
    return torch.autograd.grad(outs, inputs, grads, create_graph=True)


def _described(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    return [None if x is None else (x.dtype, x.shape, x.device, x.layout) for x in tensors]


def _check_saved(ctx, tensors: Sequence[Tensor | None]) -> None:
    """Raise where a saved-tensor hook returned a tensor of another type, shape, device or layout."""
    names = *ctx.make._fields, *arguments.kept(ctx.make)
    for name, now, was in zip(names, _described(tensors), ctx.described, strict=True):
        if now != was:
            now, was = (f"{dtype} {list(shape)} on {device} ({layout})" for dtype, shape, device, layout in (now, was))
            raise RuntimeError(
                f"retro_kernels.{ctx.op}: a saved-tensor hook returned {name} as {now}; it was saved as {was}"
            )
