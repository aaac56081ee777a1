"""Accumulation type, position logits, dropout and softmax over visible keys, for the reference of both attentions."""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011
_MULTIPLIER_A, _MULTIPLIER_B = (0xD2511F53, 0xCD9E8D57)
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
FARTHEST = 2**29  # bound to which positions from a tensor are clamped


def accumulator(tensor: Tensor) -> torch.dtype:
    """Type of sums over a tensor: float64 of float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def widened(call):
    """Return the call with every float tensor in the accumulation type. Each is cast once, so that the gradients of an
    input with several uses are summed in that type.
    """
    dtype = accumulator(call.query)
    return type(call)(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in call))


def philox_word(seed: Tensor, key: Tensor, query: Tensor, head: Tensor, batch: Tensor) -> Tensor:
    """Return the first output word of Philox4x32-10 at counter (key, query, head, batch): int64 values in [0, 2**32).

    Every backend uses the same counters, so all drop the same probabilities for the same seed.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(key, query, head, batch)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32x32-bit product
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL_A) & _WORD, (k1 + _WEYL_B) & _WORD
    return c0


def dropout_keep(seed: Tensor, p: float, batch: int, heads: int, queries: Tensor, keys: int) -> Tensor:
    """Return bool [B,H,len(queries),keys]: True where the probability is kept. queries: row indices of the call."""
    device = queries.device
    word = philox_word(
        seed.to(device),
        torch.arange(keys, device=device),
        queries.view(-1, 1),
        torch.arange(heads, device=device).view(-1, 1, 1),
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
    )
    return word >= int(p * 2**32)


def positions(count: int, start: int, batch_start: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions, int [count], or [B,count] where each batch entry has its own start."""
    position = torch.arange(count, device=device) + start
    return position if batch_start is None else position + batch_start.clamp(-FARTHEST, FARTHEST).unsqueeze(1)


def position_logits(rel_query: Tensor, rel_key: Tensor, displacement: Tensor, rel_start: int) -> Tensor:
    """Return rel_query [B,n,H,E] . rel_key[displacement - rel_start] -> [B,H,n,s]; 0 for a row outside the table.

    displacement: int [n,s] or [B,1,n,s].
    """
    band = torch.einsum("bnhe,hte->bhnt", rel_query, rel_key.expand(rel_query.shape[2], -1, -1))
    row = displacement - rel_start
    inside = (row >= 0) & (row < rel_key.shape[1])
    row = row.clamp(0, rel_key.shape[1] - 1).expand(band.shape[0], band.shape[1], -1, -1)
    return band.gather(3, row).masked_fill(~inside, 0)


def softmax_attend(
    logits: Tensor, visible: Tensor, value: Tensor, keep: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """Return out [B,n,H,d], the softmax of `logits` [B,H,n,s] over the visible keys times value [B,s,H,d]; lse [B,H,n].

    A row without a visible key has out 0, lse -inf and zero gradients, even if `value` or its gradients are NaN.
    """
    logits = logits.masked_fill(~visible, float("-inf"))
    top = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if logits.shape[-1]:
        top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    probabilities = weights / total
    lse = torch.where(empty, -torch.inf, total.log() + top).squeeze(-1)
    lse = lse.to(torch.promote_types(lse.dtype, torch.float32))
    if keep is not None:
        probabilities = probabilities * keep / (1 - p)
    out = torch.einsum("bhns,bshd->bnhd", probabilities, value)
    return out.masked_fill(empty.transpose(1, 2), 0), lse
