"""Relative attention: the whole [N,S] matrix in PyTorch, SDPA with the position logits as its mask, FlexAttention."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import HIDDEN, CompiledTwin, attend, flex_attention, repeat_groups
from ._common import position_bias as skewed_bias


def _visible(n: int, keys: int, offset: int, causal, causal_gap, window, key_mask, device) -> Tensor | None:
    """bool [1 or B,1,N,S], None where everything is visible."""
    visible = None
    if causal or window is not None:
        ones = torch.ones(n, keys, dtype=torch.bool, device=device)
        visible = ones
        if causal:
            visible = visible & ones.tril(offset - causal_gap)
        if window is not None:
            visible = visible & ones.triu(offset - window + 1)
        visible = visible[None, None]
    if key_mask is not None:
        visible = key_mask[:, None, None] if visible is None else visible & key_mask[:, None, None]
    return visible


def _bias(query, keys: int, offset: int, rel_key, rel_query, rel_start, position) -> Tensor | None:
    """Position logits [B,H,N,S]: by the skew for a full table, by a gather for a bounded one."""
    if rel_key is None:
        return None
    rel_query = query if rel_query is None else rel_query
    rel_query = rel_query if position is None else rel_query + position
    n, rows = query.shape[1], rel_key.shape[1]
    lowest = offset - (keys - 1)
    if 4 * rows >= n + keys - 1:
        return skewed_bias(rel_query, rel_key, keys, lowest, rel_start)
    start = lowest if rel_start is None else rel_start
    logits = F.pad(torch.einsum("bnhe,hte->bhnt", rel_query, rel_key.expand(query.shape[2], -1, -1)), (1, 1))
    # column 0 and the last are zero: where a displacement outside the table lands
    column = (
        torch.arange(n, device=query.device)[:, None] + (offset - start + 1) - torch.arange(keys, device=query.device)
    )
    return logits.gather(-1, column.clamp(0, rows + 1).expand(*logits.shape[:2], -1, -1))


class Call(NamedTuple):
    """A call as the baselines that write every logit need it."""

    query: Tensor  # [B,N,H,D], content bias added
    key: Tensor  # [B,S,H,D]
    value: Tensor
    bias: Tensor | None  # [B,H,N,S]: position logits
    visible: Tensor | None  # bool [1 or B,1,N,S]
    scale: float
    triangle: bool  # nothing but the causal mask of a square


class Arguments(NamedTuple):
    """The op's arguments that the baselines serve."""

    query: Tensor
    key: Tensor
    value: Tensor
    rel_key: Tensor | None = None
    rel_query: Tensor | None = None
    rel_start: int | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    causal: bool = False
    causal_gap: int = 0
    window: int | None = None
    query_offset: int | None = None
    key_mask: Tensor | None = None
    scale: float | None = None

    @property
    def offset(self) -> int:
        if self.query_offset is not None:
            return self.query_offset
        return self.key.shape[1] - self.query.shape[1] if self.causal else 0

    @property
    def content(self) -> Tensor:
        return self.query if self.content_bias is None else self.query + self.content_bias

    @property
    def factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


def _call(query, key, value, **options) -> Call:
    """The op's arguments with everything materialised."""
    a = Arguments(query, key, value, **options)
    n, h, keys = query.shape[1], query.shape[2], key.shape[1]
    bias = _bias(query, keys, a.offset, a.rel_key, a.rel_query, a.rel_start, a.position_bias)
    visible = _visible(n, keys, a.offset, a.causal, a.causal_gap, a.window, a.key_mask, query.device)
    masked = a.causal_gap != 0 or a.window is not None or a.key_mask is not None
    triangle = bias is None and a.causal and not masked and n == keys and a.offset == 0
    return Call(a.content, repeat_groups(key, h), repeat_groups(value, h), bias, visible, a.factor, triangle)


def eager(query, key, value, **options) -> Tensor:
    """Every logit in memory."""
    call = _call(query, key, value, **options)
    logits = torch.einsum("bnhd,bshd->bhns", call.query, call.key)
    if call.bias is not None:
        logits = logits + call.bias
    return attend(logits * call.scale, call.visible, call.value, "bhns,bshd->bnhd")


def sdpa_bias(query, key, value, **options) -> Tensor:
    """torch's scaled dot-product attention, the position logits and the mask materialised as its additive mask."""
    call = _call(query, key, value, **options)
    mask = call.visible
    if call.bias is not None:
        bias = call.bias * call.scale
        mask = bias if call.visible is None else bias.masked_fill(~call.visible, HIDDEN[query.dtype])
    sides = [t.transpose(1, 2) for t in (call.query, call.key, call.value)]
    shown = {"is_causal": True} if call.triangle else {"attn_mask": mask}
    out = F.scaled_dot_product_attention(*sides, scale=call.scale, **shown).transpose(1, 2)
    if call.visible is not None and not call.triangle:
        out = out.masked_fill(~call.visible.any(-1).transpose(1, 2)[..., None], 0)  # rows that see nothing
    return out


def sdpa_plain(query, key, value, **options) -> Tensor:
    """The same without position logits: what the positions cost."""
    return sdpa_bias(query, key, value, **options)


def flex(query, key, value, **options) -> Tensor:
    """FlexAttention: a block mask, and the un-skewed position logits [B,H,N,T] as a captured tensor."""
    a = Arguments(query, key, value, **options)
    n, h, keys, offset = query.shape[1], query.shape[2], key.shape[1], a.offset
    score = None
    if a.rel_key is not None:
        start = offset - (keys - 1) if a.rel_start is None else a.rel_start
        wanted = query if a.rel_query is None else a.rel_query
        wanted = wanted if a.position_bias is None else wanted + a.position_bias
        rows = a.rel_key.shape[1]
        # a zero row on either side is where a displacement outside the table lands
        band = F.pad(torch.einsum("bnhe,hte->bhnt", wanted, a.rel_key.expand(h, -1, -1)) * a.factor, (1, 1))

        def score(value, batch, head, i, j):
            return value + band[batch, head, i, (i + offset - j - start + 1).clamp(0, rows + 1)]

    sides = [t.transpose(1, 2).contiguous() for t in (a.content, key, value)]
    mask = _block_mask(n, keys, offset, a.causal, a.causal_gap, a.window, query.device)
    out = flex_attention()(*sides, score_mod=score, block_mask=mask, scale=a.factor, enable_gqa=key.shape[2] != h)
    return out.transpose(1, 2)


@functools.lru_cache(maxsize=8)  # a model builds it once and uses it in every layer
def _block_mask(n: int, keys: int, offset: int, causal, causal_gap, window, device):
    if not causal and window is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch, head, i, j):
        displacement = i + offset - j
        visible = displacement >= (causal_gap if causal else -keys)
        return visible & (displacement < window) if window is not None else visible

    return create_block_mask(mask, None, None, n, keys, device=device)


eager_compiled = CompiledTwin(eager)
