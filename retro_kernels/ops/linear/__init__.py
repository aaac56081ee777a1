"""Linear map of rows, as torch has it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...core import eager, operator
from .call import Linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """y = input weight^T + bias, like `torch.nn.functional.linear`.

        >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5])).tolist()
        [[11.5]]

    Args:
        input: [...,I].
        weight: [J,I].
        bias: [J].
        backend: "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        y [...,J] in the type of input.

    Differentiable in input, weight and bias, any number of times.

    With backend=None torch's own function serves the call unless the `cpu` kernel is faster: for large float32 products
    on x86 processors with AVX-512 that are not Intel's, where torch's library uses AVX2. Compilers, transforms,
    autocast and subclasses of tensors also get torch's function.

    Copies: the `cpu` kernel copies an input or weight whose last two dimensions are both not contiguous.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.
    """
    call = Linear(input, weight, bias)
    return eager.serve_or_torch("linear", call, F.linear) if backend is None else eager.serve("linear", call, backend)


operator.register("linear", Linear)
