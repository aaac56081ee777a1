"""Relative attention on the CPU (csrc/cpu/relative_attention_*.cpp).

Beside the outputs a thread packs the keys, values and relative keys that its task sees, of one key head at a time, into
scratch: O((N+S)*(D+E)) a thread, never N*S. One or two queries read their keys as they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from . import empty, unsupported_tensors


def unsupported(call) -> str | None:
    if call.batch_offset is not None:
        return "a tensor as query_offset is not served yet"
    if call.window_block is not None:
        return "window_block is not served yet"
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE})


def forward(call) -> tuple[Tensor, Tensor]:
    b, n, h, _ = call.query.shape
    out = empty(call.query.shape, call.query.dtype)
    lse = empty((b, h, n), torch.float32)
    run = _native.extension("_cpu").relative_attention_forward
    run(_native.problem(call), _native.view(out), _native.view(lse), torch.get_num_threads())
    return out, lse


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """float32 partial sums: dK and dV of one key head a task, d rel_key of the heads of a task; see Cut in the source."""
    wanted = [
        empty(tensor.shape, tensor.dtype) if need and (tensor := getattr(call, name)) is not None else None
        for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)
    ]
    run = _native.extension("_cpu").relative_attention_backward
    views = [_native.view(t) for t in (*outputs, *grads)]
    run(_native.problem(call), *views, tuple(map(_native.view, wanted)), torch.get_num_threads())
    return wanted
