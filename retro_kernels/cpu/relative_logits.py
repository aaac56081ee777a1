"""Position logits on the CPU (csrc/cpu/relative_logits.cpp): the band lives in scratch, a chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from . import empty, unsupported_tensors


def unsupported(call) -> str | None:
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE})


def forward(call) -> tuple[Tensor]:
    b, n, h, _ = call.query.shape
    logits = empty((b, h, n, call.key_len), call.query.dtype)
    run = _native.extension("_cpu").relative_logits_forward
    run(_native.problem(call), _native.view(logits), torch.get_num_threads())
    return (logits,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    wanted = [
        empty(tensor.shape, tensor.dtype) if need and (tensor := getattr(call, name)) is not None else None
        for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)
    ]
    run = _native.extension("_cpu").relative_logits_backward
    run(_native.problem(call), *map(_native.view, (grads[0], *wanted)), torch.get_num_threads())
    return wanted
