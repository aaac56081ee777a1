"""Derivatives of the registered operators: reverse mode, forward mode, and torch's transforms.

Every entrance to an op ends here unless nothing differentiates the call: the public function, the raw operator, and
exported, traced and compiled graphs. A call goes through two autograd functions, one for the op and one for its
gradient. vmap makes one call for each entry. An op registers its formula for forward mode; an op without one raises an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import private
from .arguments import kept

#: forward mode of an op: (call, outputs, call of the inputs' tangents, backend) -> a tangent or None for each output
FORWARD_MODE: dict[str, Callable] = {}


def forward(op: str, call, backend: str | None) -> tuple[Tensor, ...]:
    """Return the outputs of a resolved call."""
    return _Forward.apply(op, type(call), backend, *call)


def backward(op: str, call, backend: str | None, outs, grads, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Return the gradients that `needs` selects, as the operator `<op>_backward` lists them."""
    return _Backward.apply(op, backend, len(call), len(outs), needs, *call, *outs, *grads)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(op: str, make: type, backend: str | None, *fields):
        outs = getattr(torch.ops.retro_kernels, op)(*fields, backend)
        return outs if isinstance(outs, tuple) else (outs,)

    @staticmethod
    def setup_context(ctx, inputs, outs):
        ctx.op, make, ctx.backend, *fields = inputs
        ctx.make = make
        ctx.options = [None if isinstance(x, Tensor) else x for x in fields]
        tensors = [x if isinstance(x, Tensor) else None for x in fields]
        reads = [outs[make.RETURNS.index(name)] for name in kept(make)]
        ctx.layouts = layouts((*tensors, *reads))
        ctx.save_for_backward(*tensors, *reads)
        ctx.save_for_forward(*tensors, *outs)
        ctx.set_materialize_grads(False)
        if not outs[-1].is_floating_point():  # the indices of topk_chunks
            ctx.mark_non_differentiable(outs[-1])

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # read once: torch's checkpointing refuses a second time
        call, outs = _call_and_outputs(ctx, saved)
        places = [call._fields.index(name) for name in call.DIFFERENTIABLE]
        needs = tuple(ctx.needs_input_grad[3 + place] for place in places)
        results = [None] * (3 + len(call))
        if any(needs) and not all(grad is None for grad in grads):
            refuse_batched(ctx.op, grads)
            check_saved(ctx.op, (*call._fields, *kept(call)), saved, ctx.layouts)
            found = iter(backward(ctx.op, call, ctx.backend, outs, grads, needs))
            for place, needed in zip(places, needs):
                results[3 + place] = next(found) if needed else None
        return tuple(results)

    @staticmethod
    def jvp(ctx, *tangents):
        if ctx.op not in FORWARD_MODE:
            raise no_forward_mode(ctx.op)
        call, outs = _call_and_outputs(ctx, ctx.saved_tensors)
        return FORWARD_MODE[ctx.op](call, outs, ctx.make(*tangents[3:]), ctx.backend)

    @staticmethod
    def vmap(info, in_dims, *values):
        return _one_by_one(_Forward, info, in_dims, values)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(op: str, backend: str | None, fields: int, outputs: int, needs: tuple[bool, ...], *values):
        operator = getattr(torch.ops.retro_kernels, f"{op}_backward")
        return tuple(operator(*values[:fields], backend, *values[fields:], list(needs)))

    @staticmethod
    def setup_context(ctx, inputs, grads):
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise no_second_derivative(ctx.op)

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_second_derivative(ctx.op)

    @staticmethod
    def vmap(info, in_dims, *values):
        return _one_by_one(_Backward, info, in_dims, values)


def _call_and_outputs(ctx, saved: Sequence[Tensor | None]):
    """Return the call and the outputs among the tensors that `setup_context` saved for one of the two modes."""
    call = ctx.make(*[option if x is None else x for x, option in zip(saved, ctx.options)])
    return call, saved[len(ctx.options) :]


def _one_by_one(function, info, in_dims, values):
    """Make one call for each entry: an entry's result then does not depend on the number of entries."""

    def entry(i: int) -> list:
        return [x if dim is None or not isinstance(x, Tensor) else x.select(dim, i) for x, dim in zip(values, in_dims)]

    entries = [function.apply(*entry(i)) for i in range(info.batch_size)]
    outs = tuple(torch.stack(parts) for parts in zip(*entries, strict=True))
    return outs, (0,) * len(outs)


def no_second_derivative(op: str) -> Exception:
    return RuntimeError(f"retro_kernels.{op}: second derivatives are not implemented")


def no_forward_mode(op: str) -> Exception:
    remedy = "reverse mode is (torch.func.vjp, jacrev)"
    return NotImplementedError(f"retro_kernels.{op}: forward-mode derivatives are not implemented; {remedy}")


def tracked(values) -> bool:
    """Whether reverse mode or forward mode differentiates a call of these values."""
    reverse, tangents = torch.is_grad_enabled(), private.may_have_tangents()
    return any(
        (reverse and value.requires_grad) or (tangents and forward_ad.unpack_dual(value).tangent is not None)
        for value in values
        if isinstance(value, Tensor)
    )


def layouts(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """Return type, shape, device and layout of each tensor. Those of saved tensors must not change."""
    return [None if x is None else (x.dtype, x.shape, x.device, x.layout) for x in tensors]


def check_saved(op: str, names: Sequence[str], saved: Sequence[Tensor | None], expected: list[tuple | None]) -> None:
    """Raise where a saved-tensor hook returned a tensor of another layout."""
    found = layouts(saved)
    if found == expected:
        return
    name, got, was = next(three for three in zip(names, found, expected, strict=True) if three[1] != three[2])
    got, was = (f"{dtype} {list(shape)} on {device} ({layout})" for dtype, shape, device, layout in (got, was))
    raise RuntimeError(f"retro_kernels.{op}: a saved-tensor hook returned {name} as {got}; it was saved as {was}")


def refuse_batched(op: str, grads) -> None:
    """Raise for gradients of `is_grads_batched`: no custom operator can unbatch them."""
    if any([grad is not None and private.is_batched(grad) for grad in grads]):
        remedy = "torch.func.vmap over torch.func.vjp is"
        raise NotImplementedError(f"retro_kernels.{op}: is_grads_batched is not implemented; {remedy}")
