"""Root-mean-square norms in one pass over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_kernels.core import native
from retro_kernels.cpu_lib import rms_norm as _rms_norm

from .products import plain

#: Elements below which a call costs more than it gains.
LEAST_ELEMENTS = 2**14


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` of a width whose float32 rows on a CPU are normalised in one pass over memory, and differentiated in
    one, where torch takes five and ten: same parameters, names, initial weights and hooks.

    Where the `cpu` backend can't run, and for all else (GPUs, other types, `torch.compile`, DTensors, transforms), it
    is torch's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight, as x [...,d]."""
        if not _serves(x, self.weight, self.normalized_shape):
            return super().forward(x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _RMSNorm.apply(x, self.weight, eps)
        return _normalise(x, self.weight, eps)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = _normalise(x, weight, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # a backward pass that is differentiated itself takes what autograd knows
            wanted = [t for t, need in zip((x, weight), needs) if need]
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
            grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
            return *(next(grads) if need else None for need in needs), None
        rows = (t.reshape(-1, len(weight)).contiguous() for t in (x, grad))
        dx, dweight = _rms_norm.backward(next(rows), weight, rstd, next(rows), needs)
        return None if dx is None else dx.view(x.shape), dweight, None


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm.forward(x.reshape(-1, len(weight)).contiguous(), weight, eps)
    return y.view(x.shape), rstd


def _serves(x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
    return (
        not torch.compiler.is_compiling()
        and weight is not None
        and x.dtype is torch.float32 is weight.dtype
        and x.device.type == "cpu" == weight.device.type
        and plain(x)
        and plain(weight)
        and x.numel() >= LEAST_ELEMENTS
        and x.shape[-1:] == weight.shape == shape
        and weight.is_contiguous()
        and native.unavailable("_cpu") is None
    )
