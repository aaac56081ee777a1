"""Position logits alone: (query_i + position_bias) . rel_key[i + query_offset - j - rel_start], unscaled."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor]:
    dtype = attention.accumulator(call.query)
    query = call.query.to(dtype)
    if call.position_bias is not None:
        query = query + call.position_bias.to(dtype)
    rows = torch.arange(query.shape[1], device=query.device).view(-1, 1) + call.query_offset
    displacement = rows - torch.arange(call.key_len, device=query.device)
    logits = attention.position_logits(query, call.rel_key.to(dtype), displacement, call.rel_start)
    return (logits.to(call.query.dtype),)


backward = autograd.backward_of(forward)
