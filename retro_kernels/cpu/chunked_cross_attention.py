"""Chunked cross-attention on the CPU (csrc/cpu/chunked_cross_attention_*.cpp).

Beside the outputs it uses scratch per thread (about 1 MiB at RETRO's sizes), no copy of a whole input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from . import empty, unsupported_tensors


def unsupported(call) -> str | None:
    if call.batch_start is not None:
        return "a tensor as query_start is not served yet"
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE})


def forward(call) -> tuple[Tensor, Tensor]:
    b, n, h, _ = call.query.shape
    out = empty(call.query.shape, call.query.dtype)
    lse = empty((b, h, n), torch.float32)
    run = _native.extension("_cpu").chunked_cross_attention_forward
    run(_native.problem(call), _native.view(out), _native.view(lse), torch.get_num_threads())
    return out, lse


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Recomputes the probabilities from lse. Sums over chunks (rel_key, biases) are float32, in an order fixed by the sizes."""
    out, lse = outputs
    dout, dlse = grads
    if dout is None:
        dout = torch.zeros_like(out)
    inputs = [getattr(call, name) for name in call.DIFFERENTIABLE]
    summed = {"rel_key", "content_bias", "position_bias", "neighbour_gate"}
    found = [
        empty(x.shape, torch.float32 if name in summed else x.dtype) if need and x is not None else None
        for name, x, need in zip(call.DIFFERENTIABLE, inputs, needs, strict=True)
    ]
    views = [_native.view(t) for t in (out, lse, dout, dlse)]
    run = _native.extension("_cpu").chunked_cross_attention_backward
    run(_native.problem(call), *views, tuple(map(_native.view, found)), torch.get_num_threads())
    return [None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)]
