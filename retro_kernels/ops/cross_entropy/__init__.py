"""Cross-entropy of rows of logits."""

from __future__ import annotations

from torch import Tensor

from ...core import operator
from ...core.call import serve
from .call import CrossEntropy


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """loss_t = -log softmax(input_t)[target_t] in nats, like `torch.nn.functional.cross_entropy` of class indices.

        >>> loss = cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        >>> round(loss.item(), 4)
        0.6931

    Args:
        input: [T,V], logits.
        target: int64 [T], each from 0 to V-1 or ignore_index. On the CPU, the kernel that uses the values checks them.
            The host does not read the values on a GPU: a row whose target is out of range has loss NaN and gradient
            NaN there.
        ignore_index: rows with this target have loss 0 and gradient 0, even if their logits are NaN, and do not count
            in the mean.
        reduction: "none", "sum" or "mean". The mean of no row is NaN.
        backend: "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        Losses [T] with reduction="none", else a number; float32 (float64 for float64 logits).

    Differentiable in input, any number of times. The gradient is as large as the logits and computed from them again.

    Raises:
        ValueError, TypeError: naming the argument, before any result is written.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected 'none', 'sum' or 'mean'; got {reduction!r}")
    losses = serve("cross_entropy", CrossEntropy(input, target, ignore_index), backend)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


operator.register("cross_entropy", CrossEntropy)
