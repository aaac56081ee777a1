"""Linear maps by the fastest product of float32 matrices that torch has on this processor.

torch multiplies float32 matrices on x86 by MKL, which takes AVX2 on every processor that is not Intel's; oneDNN, which
torch brings too, takes AVX-512 where there is any. So on processors that are not Intel's the products of `linear`, and
those of its gradients, are oneDNN's: twice as fast on a Zen 5 (docs/notes/models.md has the numbers and the command).
All else is `torch.nn.functional.linear`: GPUs, other types, autocast, `torch.compile`, DTensors, transforms.

RETRO_MODEL_GEMM=torch in the environment turns it off, RETRO_MODEL_GEMM=onednn asks for it on Intel's processors.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

#: Multiply-adds below which a call costs more than the better product gains.
LEAST_MULTIPLY_ADDS = 2**21


class Linear(nn.Linear):
    """`nn.Linear` whose products are those of `linear`: same parameters, names, initial weights and hooks."""

    def forward(self, x: Tensor) -> Tensor:
        """[...,out_features] of x [...,in_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, [...,J] of x [...,I], weight [J,I] and bias [J]; differentiable twice."""
    if not _serves(x, weight, bias):
        return F.linear(x, weight, bias)
    operands = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b [I,J] of a [I,K] and b [K,J], without a gradient: for code that computes its own."""
    return _product(a, b.mT, None) if _serves(a, b.mT, None) else a @ b


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        asks_x, asks_weight, asks_bias = ctx.needs_input_grad
        # a backward pass that is differentiated itself takes products that autograd knows
        product = torch.matmul if torch.is_grad_enabled() else matmul
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(rows, weight).view(x.shape) if asks_x else None,
            product(rows.mT, x.reshape(-1, x.shape[-1])) if asks_weight else None,
            rows.sum(0) if asks_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN is to multiply these, by what they are and not by their values."""
    return (
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and (bias is None or bias.dtype is torch.float32)
        and x.device.type == "cpu" == weight.device.type
        and not torch.compiler.is_compiling()
        and _plain(x)
        and _plain(weight)
        and x.numel() * weight.shape[0] >= LEAST_MULTIPLY_ADDS
        and x.shape[-1] == weight.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and _preferred()
    )


def _plain(x: Tensor) -> bool:
    """Neither a subclass (DTensor, fake tensors) nor seen by a transform (vmap, jvp): those know no oneDNN."""
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad._current_level >= 0
    return type(x) in (Tensor, nn.Parameter) and not transformed


@functools.cache
def _preferred() -> bool:
    wish = os.environ.get("RETRO_MODEL_GEMM", "")
    if wish not in ("", "torch", "onednn"):
        raise ValueError(f"RETRO_MODEL_GEMM: expected torch or onednn; got {wish!r}")
    if (
        wish == "torch"
        or not torch.backends.mkldnn.is_available()
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    return wish == "onednn" or (platform.machine() in ("x86_64", "AMD64") and not _intel())


def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()
