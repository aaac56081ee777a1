"""Norms of float32 rows (csrc/cpu/rms_norm.cpp): no op of the package, but what the residual layers of models need."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import native
from . import empty

#: Rows whose part of the weight's gradient is summed in one go.
GROUP = 64


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight of x [T,d] and weight [d], float32 without gaps, and 1 / rms(x) [T] for `backward`."""
    y, rstd = empty(x.shape, torch.float32), torch.empty(len(x))
    views = map(native.view, (x, weight, y, rstd))
    native.extension("_cpu").rms_norm_forward(*views, eps, torch.get_num_threads())
    return y, rstd


def backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x [T,d] and weight [d] from that of the result, those that are needed."""
    dx = empty(x.shape, torch.float32) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    partial = torch.empty(-(-len(x) // GROUP), len(weight))
    views = map(native.view, (x, weight, rstd, grad, dx, dweight, partial))
    native.extension("_cpu").rms_norm_backward(*views, torch.get_num_threads())
    return dx, dweight
