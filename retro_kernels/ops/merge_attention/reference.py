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
    empty, dead = total == 0, lses == -torch.inf
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, total.log() + top)
    # filled, not multiplied: 0 * NaN would be NaN, in outs and in the gradients of a query without keys
    weights = (weights / total).masked_fill(dead, 0)
    outs = call.outs.to(attention.accumulator(call.outs))
    if lses.device.type != "cpu" or dead.any():  # the fill copies outs; a GPU would wait for any()
        outs = outs.masked_fill(_rows(dead), 0)
    out = (_rows(weights).to(outs.dtype) * outs).sum(0)
    return out.to(call.outs.dtype), lse


def _rows(x: Tensor) -> Tensor:
    """[...,H,N] as [...,N,H,1]."""
    return x.transpose(-1, -2).unsqueeze(-1)


backward = autograd.backward_of(forward)
