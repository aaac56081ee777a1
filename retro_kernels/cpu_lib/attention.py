"""Outputs, gradients and calls into C++ of the two attentions on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from . import empty, native_call

#: gradients that C++ returns in float32: sums over many rows
_SUMMED = frozenset({"rel_key", "content_bias", "position_bias", "neighbour_gate"})
#: gradients that are also sums over batch entries; where entries have their own positions, C++ returns one for each
_SHARED = _SUMMED - {"neighbour_gate"}


def forward(op: str, call) -> tuple[Tensor, Tensor]:
    """Return out in the query's type, and lse [B,H,N] float32."""
    b, n, h, _ = call.query.shape
    out = empty(call.query.shape, call.query.dtype)
    lse = empty((b, h, n), torch.float32)
    native_call.call(f"{op}_forward", call, out, lse)
    return out, lse


def backward(op: str, call, outputs, grads, needs) -> list[Tensor | None]:
    """Return one gradient for each entry of DIFFERENTIABLE."""
    (out, lse), (dout, dlse) = outputs, grads
    positions = call.batch_start if op == "chunked_cross_attention" else call.batch_offset
    if dout is None:
        dout = torch.zeros_like(out)
    each = () if positions is None else tuple(positions.shape)
    results = {}
    for name, need in zip(call.DIFFERENTIABLE, needs, strict=True):
        x = getattr(call, name)
        if need and x is not None:
            shape = (*each, *x.shape) if name in _SHARED else x.shape
            results[name] = empty(shape, torch.float32 if name in _SUMMED else x.dtype)
    wanted = tuple(results.get(name) for name in call.DIFFERENTIABLE)
    native_call.call(f"{op}_backward", call, out, lse, dout, dlse, wanted)
    for name in [name for name in results if name in _SUMMED]:
        total = results[name].sum(0) if each and name in _SHARED else results[name]
        results[name] = total.to(out.dtype)
    return [results.get(name) for name in call.DIFFERENTIABLE]
