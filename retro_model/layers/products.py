"""Linear maps by the fastest product of float32 matrices that there is on this processor.

torch multiplies float32 matrices on x86 by MKL, which takes AVX2 on every processor that is not Intel's. Where such a
processor has AVX-512, the products of `linear`, and those of its gradients, are made by the `cpu` backend, or without
its extension by oneDNN, which torch brings along: twice as fast on a Zen 5 (docs/lab/models.md has the numbers and
the command). The kernels read matrices whichever way they lie, where oneDNN has a gradient copied for a weight's.
All else is `torch.nn.functional.linear`: GPUs, other types, autocast, `torch.compile`, DTensors, transforms.

RETRO_MODEL_GEMM in the environment chooses: torch, onednn or kernels.
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

from retro_kernels.core import native
from retro_kernels.cpu_lib import matmul as _matmul

#: Multiply-adds below which a call costs more than the better product gains.
LEAST_MULTIPLY_ADDS = 2**21
#: Rows below which the kernels' copy of the other matrix costs more than they gain on oneDNN.
LEAST_ROWS = 32
WAYS = ("torch", "onednn", "kernels")


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
    rows = x.numel() // max(1, x.shape[-1])
    if _preferred() == "kernels" and min(rows, weight.shape[0]) >= LEAST_ROWS:
        flat = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
        return _matmul.matmul(flat, weight.mT, bias).view(*x.shape[:-1], weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN or the kernels are to multiply these, by what they are and not by their values."""
    return (
        not torch.compiler.is_compiling()  # which can't trace what follows
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and (bias is None or _a_row(bias, weight))
        and x.device.type == "cpu" == weight.device.type
        and plain(x)
        and plain(weight)
        and x.numel() * weight.shape[0] >= LEAST_MULTIPLY_ADDS
        and x.shape[-1] == weight.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and _preferred() != "torch"
    )


def _a_row(bias: Tensor, weight: Tensor) -> bool:
    """oneDNN reads as many floats in a row as `weight` has rows, whatever the bias's size and stride."""
    return (
        bias.dtype is torch.float32
        and bias.device.type == "cpu"
        and plain(bias)
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
    )


def plain(x: Tensor) -> bool:
    """Neither a subclass (DTensor, fake tensors) nor seen by a transform (vmap, jvp): those know no oneDNN."""
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad._current_level >= 0
    return type(x) in (Tensor, nn.Parameter) and not transformed


@functools.cache
def _preferred() -> str:
    """Of WAYS; what was asked for and isn't there is torch's."""
    wish = os.environ.get("RETRO_MODEL_GEMM", "")
    if wish not in ("", *WAYS):
        raise ValueError(f"RETRO_MODEL_GEMM: expected {', '.join(WAYS)}; got {wish!r}")
    onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not onednn or wish == "torch":
        return "torch"
    kernels = native.unavailable("_cpu") is None
    if wish:
        return wish if wish != "kernels" or kernels else "onednn"
    if platform.machine() not in ("x86_64", "AMD64") or _intel():
        return "torch"
    return "kernels" if kernels and native.cpu_isa().startswith("avx512") else "onednn"


def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()
