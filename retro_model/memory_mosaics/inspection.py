"""Inspect each contextual memory: its errors of prediction, its attention and the decay of its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .contextual_memory import normalised, read
from .model import MemoryMosaics


@dataclass(frozen=True)
class Inspection:
    """Contextual memories of one block on tokens [B,N]. N-1 values are known, because a value needs the next token.

    error: [B,N-1,h], ||y_T - v_T|| / value_scale. 0 is a perfect prediction; value_scale is the length of all values.
    baseline: the same error of the mean of the values before T instead of y_T.
    attention: [B,h,N,N-1], softmax_i(k_T·k_i), 0 for i >= T.
    decay, key_scale, value_next: [h], the memory's scalars.
    """

    error: Tensor
    baseline: Tensor
    attention: Tensor
    decay: Tensor
    key_scale: Tensor
    value_next: Tensor

    @property
    def skill(self) -> Tensor:
        """[h]: 1 - mean error^2 / mean baseline^2, without the first token. 1: perfect; 0: keys do not help."""
        return 1 - self.error[:, 1:].square().mean((0, 1)) / self.baseline[:, 1:].square().mean((0, 1))


@torch.no_grad()
def inspect(model: MemoryMosaics, tokens: Tensor) -> list[Inspection]:
    """Inspect every block's memories on tokens [B,N], in evaluation mode. Takes memory for [B,h,N,N] a block.

    Example:
        for number, block in enumerate(inspect(model, tokens), 1):
            print(number, block.skill.tolist(), block.decay.tolist())
    """
    training = model.training
    model.eval()
    try:
        inspected, x = [], model.embedding(tokens)
        for block in model.blocks:
            inspected.append(_inspect(block.context, block.context_norm(x)))
            x = block(x)
        return inspected
    finally:
        model.train(training)


def _inspect(memory, x: Tensor) -> Inspection:
    key = normalised(memory.averages(x, None, None), memory.key_scale)
    value = memory.values(memory.heads_of(memory.value(x)))
    y, lse = read(key, key[:, :-1], value, causal=True, backend=memory.backend)
    logits = torch.einsum("bnhd,bshd->bhns", key, key[:, :-1])
    past = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).tril(-1)
    before = torch.arange(value.shape[1], device=x.device).clamp(min=1).view(-1, 1, 1)
    mean = (value.cumsum(1) - value) / before
    error, baseline = ((guess - value).norm(dim=-1) / memory.value_scale for guess in (y[:, :-1], mean))
    attention = torch.where(past, torch.exp(logits - lse.unsqueeze(-1)), 0)
    return Inspection(error, baseline, attention, memory.decay, memory.key_scale, memory.value_next.detach().clone())
