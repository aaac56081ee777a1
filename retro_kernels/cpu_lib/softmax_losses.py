"""Losses of logits and their gradient (csrc/cpu/softmax_losses.cpp): no op of the package, but what readouts need."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import native


def softmax_losses_(logits: Tensor, targets: Tensor, weights: Tensor, gradient: bool) -> Tensor:
    """weights * -log softmax(logits)[targets], [T] of logits [T,V], targets int64 [T] and weights [T]; float32 without
    gaps. The logits become the losses' gradient if it is wanted."""
    losses = torch.empty_like(weights)
    views = map(native.view, (logits, targets, weights, losses))
    native.extension("_cpu").softmax_losses(*views, gradient, torch.get_num_threads())
    return losses
