"""Gradients of the reference, by autograd of its forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core import private


def backward_of(forward: Callable) -> Callable:
    """Return `backward(call, outputs, grads, needs)` that reruns `forward` under autograd."""

    def backward(call, outputs, grads, needs) -> list[Tensor | None]:
        names = [name for name, needed in zip(call.DIFFERENTIABLE, needs, strict=True) if needed]
        with torch.enable_grad(), private.autograd_on():
            inputs = [getattr(call, name).detach().requires_grad_() for name in names]
            recomputed = forward(call._replace(**dict(zip(names, inputs, strict=True))))
            pairs = zip(recomputed, grads, strict=True)
            pairs = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
            results = [None] * len(inputs)
            if pairs:
                outs, outgoing = zip(*pairs, strict=True)
                results = torch.autograd.grad(outs, inputs, outgoing, allow_unused=True)
        results = [torch.zeros_like(x) if g is None else g for g, x in zip(results, inputs, strict=True)]
        by_name = dict(zip(names, results, strict=True))
        return [by_name.get(name) for name in call.DIFFERENTIABLE]

    return backward
