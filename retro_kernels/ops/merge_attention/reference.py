"""Merge of partial attentions by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor, Tensor]:
    lses = call.lses
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, total.log() + top)
    # filled, not multiplied: 0 * NaN would be NaN
    outs = call.outs.to(attention.accumulator(call.outs)).masked_fill(_rows(lses == -torch.inf), 0)
    out = (_rows(weights / total).to(outs.dtype) * outs).sum(0).masked_fill(_rows(empty), 0)
    return out.to(call.outs.dtype), lse


def _rows(x: Tensor) -> Tensor:
    """[...,H,N] as [...,N,H,1]."""
    return x.transpose(-1, -2).unsqueeze(-1)


backward = autograd.backward_of(forward)
