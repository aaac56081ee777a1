"""What the two attentions have in common on the CPU: outputs, gradients, and the calls into C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core import native
from . import allocator, empty

#: gradients that many rows add to: C++ leaves them in float32
_SUMMED = frozenset({"rel_key", "content_bias", "position_bias", "neighbour_gate"})
#: those of them that batch entries share; where entries have positions of their own, C++ sums over one entry at a time
_SHARED = _SUMMED - {"neighbour_gate"}


def forward(op: str, call) -> tuple[Tensor, Tensor]:
    """out in the query's type, lse [B,H,N] float32."""
    b, n, h, _ = call.query.shape
    out = empty(call.query.shape, call.query.dtype)
    lse = empty((b, h, n), torch.float32)
    run = getattr(native.extension("_cpu"), f"{op}_forward")
    run(native.problem(call), native.view(out), native.view(lse), torch.get_num_threads())
    return out, lse


def again(op: str, call, given: Sequence[int]) -> Callable[[Sequence], tuple[Tensor, Tensor]] | None:
    """`forward` of calls that differ from `call` in the fields `given` only: tensors of the same layouts, and last the
    position, where that moves. None where the extension has no such thing."""
    extension = native.extension("_cpu")
    kind = getattr(extension, type(call).__name__, None)
    if kind is None:
        return None
    b, n, h, _ = call.query.shape
    new_out = allocator(tuple(call.query.shape), call.query.dtype)
    new_lse = allocator((b, h, n), torch.float32)
    run = kind(native.problem(call), list(given)).forward
    moves = not isinstance(call[given[-1]], Tensor)
    make, options = type(call)._make, [None if isinstance(x, Tensor) else x for x in call]

    def repeated(values):
        if native.extension("_cpu") is not extension:
            fields = options.copy()
            for at, value in zip(given, values):
                fields[at] = value
            return forward(op, make(fields))
        numbers = [x.data_ptr() for x in (values[:-1] if moves else values)]
        if moves:
            numbers.append(values[-1])
        out, lse = new_out(), new_lse()
        run(numbers, out.data_ptr(), lse.data_ptr(), torch.get_num_threads())
        return out, lse

    return repeated


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
    run = getattr(native.extension("_cpu"), f"{op}_backward")
    views = [native.view(t) for t in (out, lse, dout, dlse)]
    run(
        native.problem(call),
        *views,
        tuple(native.view(results.get(name)) for name in call.DIFFERENTIABLE),
        torch.get_num_threads(),
    )
    for name in results.keys() & _SUMMED:
        total = results[name].sum(0) if each and name in _SHARED else results[name]
        results[name] = total.to(out.dtype)
    return [results.get(name) for name in call.DIFFERENTIABLE]
