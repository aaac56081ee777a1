"""Leaky average over time."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import operator
from ...core.call import serve
from .call import LeakyAverage


def leaky_average(
    x: Tensor,
    decay: Tensor,
    *,
    initial: Tensor | None = None,
    segment: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """First-order recurrence y_t = x_t + decay * y_{t-1} along the tokens, with y_{-1} = initial (0 where None).

        >>> leaky_average(torch.ones(1, 3, 1, 1), torch.tensor([0.5])).flatten().tolist()
        [1.0, 1.5, 1.75]

    With `segment`, y_t = x_t wherever segment_t differs from segment_{t-1}, t > 0: the sum starts again, and nothing
    of one packed document reaches another, not even NaN.

        >>> segment = torch.tensor([[0, 0, 1]])
        >>> leaky_average(torch.ones(1, 3, 1, 1), torch.tensor([0.5]), segment=segment).flatten().tolist()
        [1.0, 1.5, 1.0]

    Args:
        x: [B,N,H,D].
        decay: [H] in [0,1), one for each head; the type of x or float32. Its values are not checked.
        initial: [B,H,D], the state before the first token, in the first token's segment.
        segment: integers [B,N], packed documents.
        backend: "triton", "cuda", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        y [B,N,H,D] in the type of x; the state is float32.

    Differentiable in x, decay and initial, once.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs. All tensors must have the type of x (under
            autocast they are cast to it), except a float32 decay.

    Source: Zhang et al., "Memory Mosaics", arXiv 2405.06394, equation 7 (the key extractor).
    """
    return serve("leaky_average", LeakyAverage(x, decay, initial, segment), backend)


def _tangents(call: LeakyAverage, outs: tuple[Tensor], moved: LeakyAverage, backend) -> tuple[Tensor]:
    """Return the tangent: the same recurrence over dx_t + ddecay * y_{t-1}, because y is linear in x and initial."""
    x = torch.zeros_like(call.x) if moved.x is None else moved.x
    if moved.decay is not None:
        first = torch.zeros_like(call.x[:, :1]) if call.initial is None else call.initial.unsqueeze(1)
        before = torch.cat([first, outs[0][:, :-1]], 1)[:, : call.x.shape[1]]
        if call.segment is not None:
            begins = torch.nn.functional.pad(call.segment[:, 1:] != call.segment[:, :-1], (1, 0))
            before = before.masked_fill(begins[:, :, None, None], 0)
        x = x + (moved.decay.view(-1, 1) * before).to(x.dtype)
    return (leaky_average(x.contiguous(), call.decay, initial=moved.initial, segment=call.segment, backend=backend),)


operator.register("leaky_average", LeakyAverage, _tangents)
