"""Outputs, gradients and calls into C++ of the two attentions on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import steps
from . import empty

#: gradients that are sums over many rows: C++ returns them in float32
_SUMMED = frozenset({"rel_key", "content_bias", "position_bias", "neighbour_gate"})
#: sums over batch entries too; where entries have positions of their own, C++ returns a sum for each entry
_SHARED = _SUMMED - {"neighbour_gate"}


def forward(op: str, call) -> tuple[Tensor, Tensor]:
    """out in the query's type, lse [B,H,N] float32."""
    b, n, h, _ = call.query.shape
    out = empty(call.query.shape, call.query.dtype)
    lse = empty((b, h, n), torch.float32)
    steps.call("_cpu", f"{op}_forward", call, out, lse, steps.THREADS)
    return out, lse


def backward(op: str, call, outputs, grads, needs, positions: Tensor | None) -> list[Tensor | None]:
    """Recomputes the probabilities from lse. `positions` of batch entries: the call's, or None."""
    out, lse = outputs
    dout, dlse = grads
    if dout is None:
        dout = torch.zeros_like(out)
    each = () if positions is None else tuple(positions.shape)
    results = {}
    for name, need in zip(call.DIFFERENTIABLE, needs, strict=True):
        x = getattr(call, name)
        if need and x is not None:
            results[name] = empty(
                (*(each if name in _SHARED else ()), *x.shape), torch.float32 if name in _SUMMED else x.dtype
            )
    wanted = tuple(results.get(name) for name in call.DIFFERENTIABLE)
    steps.call("_cpu", f"{op}_backward", call, out, lse, dout, dlse, wanted, steps.THREADS)
    for name in [name for name in results if name in _SUMMED]:
        total = results[name].sum(0) if each and name in _SHARED else results[name]
        results[name] = total.to(out.dtype)
    return [results.get(name) for name in call.DIFFERENTIABLE]
