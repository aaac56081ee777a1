"""Root-mean-square norm of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import dispatch, layouts, operator, private
from ...core.call import resolve, serve
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
    if backend is not None or _a_kernel_serves(call):
        return serve("rms_norm", call, backend)[0]
    try:
        if torch.compiler.is_compiling() or not call.strict():
            call = resolve(call)
        return F.rms_norm(call.input, call.weight.shape, call.weight, call.eps)
    except (AttributeError, RuntimeError, TypeError):  # a check's message names the argument, torch's does not
        resolve(call)
        raise


def _a_kernel_serves(call: RMSNorm) -> bool:
    """Whether the default of `use_backend` serves a call without a named backend or, without a default, a kernel is
    faster than torch. torch serves transforms that its functions have rules for, and tensors that are not ordinary.
    """
    if torch.compiler.is_compiling() or (private.transformed() and not private.functionalizing()):
        return False
    if layouts.key(call) is None:
        return False
    default = dispatch.named(None)
    if default is None:
        return dispatch.fastest("rms_norm", call) != "reference"
    return dispatch.unsupported("rms_norm", default, call) is None


operator.register("rms_norm", RMSNorm)
