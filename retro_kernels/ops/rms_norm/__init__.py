"""Root-mean-square norm of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import operator
from ...core.call import serve, serve_or_torch
from .call import RMSNorm


def rms_norm(input: Tensor, weight: Tensor, eps: float | None = None, *, backend: str | None = None) -> Tensor:
    """y = input / sqrt(mean(input^2) + eps) * weight over the last dimension, like `torch.nn.functional.rms_norm`.

        >>> rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([1.0, 2.0]), 0.0).tolist()
        [1.0, -2.0]

    Args:
        input: [...,D].
        weight: [D], in the type of input or float32.
        eps: at least 0; None: machine epsilon of the type of input.
        backend: "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        y [...,D] in the type of input.

    Differentiable in input and weight, any number of times.

    With backend=None torch's own function serves the call unless the `cpu` kernel is faster: for at least 16,384
    float32 numbers on a CPU, with one pass over memory forward and one backward. Compilers, transforms and subclasses
    of tensors also get torch's function.

    Copies: the `cpu` kernel copies an input that is not contiguous.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4.
    """
    if eps is None:
        eps = torch.finfo(input.dtype).eps if isinstance(input, Tensor) and input.is_floating_point() else 0.0
    call = RMSNorm(input, weight, eps)
    if backend is not None:
        return serve("rms_norm", call, backend)[0]
    outs = serve_or_torch("rms_norm", call, _by_torch)
    return outs[0] if isinstance(outs, tuple) else outs


def _by_torch(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)


operator.register("rms_norm", RMSNorm)
