"""Derivatives of the registered operators: reverse mode, forward mode, and torch's transforms.

A call that something differentiates comes here, whether it was made by the public function, by the raw operator, or by
an exported, traced or compiled graph. It goes through two autograd functions, one for the op and one for its gradient.
vmap makes one call for each entry. An op registers its formula for forward mode; an op without one raises an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import call, private

#: forward mode of an op: (call, outputs, call of the inputs' tangents, backend) -> a tangent or None for each output
FORWARD_MODE: dict[str, Callable] = {}


def forward(op: str, *values):
    """Return the output of a resolved call, or its outputs, as the operator of the op does."""
    outs = _Forward.apply(op, values[-1], private.transformed(), *values[:-1])
    return outs if len(outs) > 1 else outs[0]


def backward(op: str, *values) -> list[Tensor]:
    """Return the gradients that the last value selects, as the operator `<op>_backward` does."""
    return list(_Backward.apply(op, tuple(values[-1]), *values[:-1]))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(op: str, backend: str | None, transformed: bool, *fields):
        outs = call.operator(op)(*fields, backend)
        return outs if isinstance(outs, tuple) else (outs,)

    @staticmethod
    def setup_context(ctx, inputs, outs):
        op, backend, transformed, *fields = inputs
        ctx.save_for_forward(*call.save(ctx, op, backend, fields, outs), *outs)
        ctx.twice &= not transformed  # `torch.func` differentiates the operators alone

    @staticmethod
    def backward(ctx, *grads):
        return call.gradients(ctx, grads)

    @staticmethod
    def jvp(ctx, *tangents):
        if ctx.op not in FORWARD_MODE:
            remedy = "reverse mode is (torch.func.vjp, jacrev)"
            raise NotImplementedError(f"retro_kernels.{ctx.op}: forward-mode derivatives are not implemented; {remedy}")
        given, outs = call.saved(ctx, ctx.saved_tensors)
        return FORWARD_MODE[ctx.op](given, outs, ctx.make(*tangents[3:]), ctx.backend)

    @staticmethod
    def vmap(info, in_dims, *values):
        return _one_by_one(_Forward, info, in_dims, values)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(op: str, needs: tuple[bool, ...], *values):
        return tuple(call.operator(f"{op}_backward")(*values, list(needs)))

    @staticmethod
    def setup_context(ctx, inputs, grads):
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(f"retro_kernels.{ctx.op}: second derivatives are not implemented")

    jvp = backward

    @staticmethod
    def vmap(info, in_dims, *values):
        return _one_by_one(_Backward, info, in_dims, values)


def _one_by_one(function, info, in_dims, values):
    """Make one call for each entry: an entry's result then does not depend on the number of entries."""

    def entry(i: int) -> list:
        return [x if dim is None or not isinstance(x, Tensor) else x.select(dim, i) for x, dim in zip(values, in_dims)]

    entries = [function.apply(*entry(i)) for i in range(info.batch_size)]
    outs = tuple(torch.stack(parts) for parts in zip(*entries, strict=True))
    return outs, (0,) * len(outs)


def tracked(values) -> bool:
    """Whether reverse mode or forward mode differentiates a call of these values."""
    reverse, tangents = torch.is_grad_enabled(), private.may_have_tangents()
    return any(
        (reverse and value.requires_grad) or (tangents and forward_ad.unpack_dual(value).tangent is not None)
        for value in values
        if isinstance(value, Tensor)
    )
