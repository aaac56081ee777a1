"""Cross-entropy by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention


def forward(call) -> tuple[Tensor]:
    target, ignored, wrong = call.classes()
    log_p = call.input.log_softmax(-1, dtype=attention.accumulator(call.input))
    losses = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (losses.masked_fill(wrong, torch.nan).masked_fill(ignored, 0),)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Return (softmax, minus one at the target) times the loss's gradient, in one tensor of the logits' size; autograd
    would take several.
    """
    target, ignored, wrong = (x.unsqueeze(-1) for x in call.classes())
    dx = call.input.softmax(-1, dtype=attention.accumulator(call.input))
    dx.scatter_add_(-1, target, dx.new_full(target.shape, -1.0)).mul_(grads[0].unsqueeze(-1))
    dx.masked_fill_(wrong, torch.nan).masked_fill_(ignored, 0)
    return [dx.to(call.input.dtype) if needs[0] else None]
