"""Cross-entropy of rows of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import eager, operator, private
from .call import CrossEntropy


def cross_entropy(input: Tensor, target: Tensor, *, reduction: str = "mean", backend: str | None = None) -> Tensor:
    """loss_t = -log softmax(input_t)[target_t] in nats, like `torch.nn.functional.cross_entropy` of class indices.

        >>> loss = cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        >>> round(loss.item(), 4)
        0.6931

    There is no ignore_index: to leave targets out, multiply the losses of reduction="none" by weights.

    Args:
        input: [T,V], logits.
        target: int64 [T], from 0 to V-1. Values are checked on the CPU alone; on a GPU the host does not read them.
        reduction: "none", "sum" or "mean".
        backend: "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        Losses [T] with reduction="none", else a number; float32 (float64 for float64 logits).

    Differentiable in input, any number of times. The gradient is as large as the logits and computed from them again.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected 'none', 'sum' or 'mean'; got {reduction!r}")
    call = CrossEntropy(input, target)
    if isinstance(target, Tensor) and target.device.type == "cpu" and not private.watched(call, eager.ORDINARY):
        readable = target.dtype == torch.int64 and target.layout == torch.strided and not target.is_nested
        if readable and target.numel() and isinstance(input, Tensor) and input.dim() == 2:
            low, high = (x.item() for x in target.aminmax())
            if low < 0 or high >= input.shape[1]:
                call.checked()  # an error of shape or type comes first
                wrong = low if low < 0 else high
                raise ValueError(f"target: expected 0 to V-1={input.shape[1] - 1}; got {wrong}")
    losses = eager.serve("cross_entropy", call, backend)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


operator.register("cross_entropy", CrossEntropy)
