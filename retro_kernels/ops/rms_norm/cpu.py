"""Norms of float32 rows on the CPU, in one pass over memory (csrc/cpu/rms_norm.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_lib import empty, native_call, unsupported_but_float32

GROUP = 64  # rows whose parts of the weight's gradient one task sums
LEAST_ELEMENTS = 2**14  # with fewer a call costs more than it saves

unsupported = unsupported_but_float32


def slower(call) -> str | None:
    return "the input is small" if call.input.numel() < LEAST_ELEMENTS else None


def forward(call) -> tuple[Tensor, Tensor]:
    x = native_call.rows(call.input.contiguous())
    y, rstd = empty(call.input.shape, torch.float32), empty(call.input.shape[:-1], torch.float32)
    weight = call.weight.contiguous()
    native_call.call("rms_norm_forward", x, weight, native_call.rows(y), native_call.flat(rstd), call.eps)
    return y, rstd


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    (rstd,), (dy, drstd) = outputs, grads
    x, weight = native_call.rows(call.input.contiguous()), call.weight.contiguous()
    dx = empty(call.input.shape, torch.float32) if needs[0] else None
    dweight = empty(weight.shape, torch.float32) if needs[1] else None
    partial = empty((-(-x.shape[0] // GROUP), len(weight)), torch.float32)
    grad = native_call.rows(torch.zeros_like(call.input) if dy is None else dy.contiguous())
    tensors = (x, weight, native_call.flat(rstd), grad, None if dx is None else native_call.rows(dx), dweight, partial)
    native_call.call("rms_norm_backward", *tensors)
    if dx is not None and drstd is not None:  # only the raw operator returns rstd
        dx = dx - (drstd * rstd**3 / len(weight)).unsqueeze(-1) * call.input
    return [dx, dweight]
