"""Leaky average by its recurrence: y_t = x_t + decay * y_{t-1}, y_{-1} = initial; y_t = x_t where a segment begins.

Zhang et al., "Memory Mosaics" (arXiv 2405.06394), equation 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor]:
    dtype = attention.accumulator(call.x)
    # a view of decay for each position, so that autograd adds their gradients in one pairwise sum
    decays = call.decay.to(dtype).unsqueeze(-1).expand(call.x.shape[1], -1, 1).unbind(0)  # N of [H,1]
    state = None if call.initial is None else call.initial.to(dtype)
    steps = []
    for t, (x, decay) in enumerate(zip(call.x.to(dtype).unbind(1), decays)):
        if call.segment is not None and t > 0:  # filled, not multiplied: 0 * NaN would be NaN
            state = state.masked_fill((call.segment[:, t] != call.segment[:, t - 1]).view(-1, 1, 1), 0)
        state = x if state is None else x + decay * state
        steps.append(state)
    y = torch.stack(steps, 1) if steps else torch.zeros_like(call.x)
    return (y.to(call.x.dtype),)


backward = autograd.backward_of(forward)
