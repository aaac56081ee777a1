"""Cross-entropy by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention


def forward(call) -> tuple[Tensor]:
    x = call.input.to(attention.accumulator(call.input))
    return (x.logsumexp(-1) - x.gather(-1, call.target.unsqueeze(-1)).squeeze(-1),)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Return (softmax, minus one at the target) times the loss's gradient, in one tensor of the logits' size; autograd
    would take several.
    """
    x = call.input.to(attention.accumulator(call.input))
    lse = x.logsumexp(-1, keepdim=True)
    dx = (x - lse).exp_().scatter_add_(-1, call.target.unsqueeze(-1), torch.full_like(lse, -1.0))
    return [dx.mul_(grads[0].unsqueeze(-1)).to(call.input.dtype) if needs[0] else None]
