"""Chunked cross-attention as RETRO's listing 1 writes it: shift the queries by M-1, fold them into chunks, attend in
one batch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import HIDDEN, CompiledTwin, attend, flex_attention, position_bias, repeat_groups


def _fold(query: Tensor, chunk_len: int, query_start: int) -> tuple[Tensor, int, int]:
    """query [B,N,H,D] -> [B,C,M,H,D] by attended chunk, its first chunk, and the zero rows put in front."""
    front = (query_start + 1) % chunk_len
    first = (query_start + 1) // chunk_len - 1
    rows = front + query.shape[1]
    folded = F.pad(query, (0, 0, 0, 0, front, -rows % chunk_len)).unflatten(1, (-1, chunk_len))
    return (folded[:, 1:], 0, front - chunk_len) if first < 0 else (folded, first, front)


def _unfold(out: Tensor, front: int, n: int) -> Tensor:
    """out [B,C,M,H,D] -> [B,N,H,D]; rows before the first chunk are 0."""
    out = out.flatten(1, 2)
    return F.pad(out, (0, 0, 0, 0, -front, 0))[:, :n] if front < 0 else out[:, front : front + n]


def _memory(tensor: Tensor, first: int, chunks: int, gate: Tensor | None, heads: int) -> Tensor:
    """[B,L,K,R,G,D] -> [B,C,K*R,H,D], gated."""
    tensor = tensor[:, first : first + chunks]
    if gate is not None:
        tensor = tensor * gate[:, first : first + chunks, :, None, None, None]
    return repeat_groups(tensor.flatten(2, 3), heads)


def _bias(query, key, chunk_len, query_start, rel_key, rel_query, rel_start, position) -> Tensor | None:
    """Position logits of every pair, [B,C,H,M,R]: the same for all K neighbours."""
    if rel_key is None:
        return None
    rel_query = query if rel_query is None else rel_query
    rel_query = rel_query if position is None else rel_query + position
    length = key.shape[3]
    return position_bias(_fold(rel_query, chunk_len, query_start)[0], rel_key, length, 1 - length, rel_start)


def _visible(mask: Tensor | None, first: int, chunks: int, length: int) -> Tensor | None:
    """bool [B,C,1,1,K*R]."""
    if mask is None:
        return None
    mask = mask[:, first : first + chunks]
    mask = mask if mask.dim() == 4 else mask.unsqueeze(-1).expand(-1, -1, -1, length)
    return mask.flatten(2)[:, :, None, None]


class Call(NamedTuple):
    """A call's tensors folded by attended chunk; `front` and `n` unfold the result."""

    query: Tensor  # [B,C,M,H,D], content bias added
    key: Tensor  # [B,C,K*R,H,D]
    value: Tensor
    bias: Tensor | None  # [B,C,H,M,R]: position logits, the same for all K neighbours
    visible: Tensor | None  # bool [B,C,1,1,K*R]
    scale: float
    neighbours: int  # K
    front: int
    n: int

    def flat(self) -> list[Tensor]:
        """query, key and value as torch's attention takes them: [B*C,H,rows,D]."""
        return [t.flatten(0, 1).transpose(1, 2) for t in (self.query, self.key, self.value)]

    def unflat(self, out: Tensor) -> Tensor:
        """[B*C,H,M,D] -> [B,C,M,H,D]."""
        return out.transpose(1, 2).unflatten(0, self.query.shape[:2])


def _call(
    query,
    key,
    value,
    *,
    chunk_len,
    rel_key=None,
    rel_query=None,
    rel_start=None,
    content_bias=None,
    position_bias=None,
    neighbour_mask=None,
    neighbour_gate=None,
    scale=None,
    query_start=0,
) -> Call:
    """The op's arguments, as every baseline needs them."""
    n, h, d = query.shape[1:]
    folded, first, front = _fold(query if content_bias is None else query + content_bias, chunk_len, query_start)
    keys, values = (_memory(t, first, folded.shape[1], neighbour_gate, h) for t in (key, value))
    bias = _bias(query, key, chunk_len, query_start, rel_key, rel_query, rel_start, position_bias)
    visible = _visible(neighbour_mask, first, folded.shape[1], key.shape[3])
    return Call(folded, keys, values, bias, visible, d**-0.5 if scale is None else scale, key.shape[2], front, n)


def eager(query, key, value, **options) -> Tensor:
    """Whole batch at once, every logit in memory."""
    call = _call(query, key, value, **options)
    logits = torch.einsum("bcmhd,bcshd->bchms", call.query, call.key)
    if call.bias is not None:
        logits = logits + call.bias.repeat(1, 1, 1, 1, call.neighbours)
    return _unfold(attend(logits * call.scale, call.visible, call.value, "bchms,bcshd->bcmhd"), call.front, call.n)


def sdpa_bias(query, key, value, **options) -> Tensor:
    """torch's scaled dot-product attention over the folded chunks,
    the position logits materialised as its additive mask.
    """
    call = _call(query, key, value, **options)
    b, chunks, rows, h, _ = call.query.shape
    bias = None if call.bias is None else (call.bias * call.scale).repeat(1, 1, 1, 1, call.neighbours)
    if call.visible is not None:
        empty = query.new_zeros(b, chunks, h, rows, call.key.shape[2]) if bias is None else bias
        bias = empty.masked_fill(~call.visible, HIDDEN[query.dtype])
    out = F.scaled_dot_product_attention(
        *call.flat(), attn_mask=None if bias is None else bias.flatten(0, 1), scale=call.scale
    )
    out = call.unflat(out)
    if call.visible is not None:
        out = out * call.visible.any(-1)[..., None]
    return _unfold(out, call.front, call.n)


def sdpa_plain(query, key, value, **options) -> Tensor:
    """The same without position logits: what the positions cost."""
    return sdpa_bias(query, key, value, **options)


def flex(query, key, value, **options) -> Tensor:
    """FlexAttention over the folded chunks; the un-repeated position logits [.., M, R] are a captured tensor."""
    call = _call(query, key, value, **options)
    length, score = key.shape[3], None
    if call.bias is not None:
        captured = (call.bias * call.scale).flatten(0, 1)

        def score(value, sequence, head, i, j):
            return value + captured[sequence, head, i, j % length]

    out = flex_attention()(*(t.contiguous() for t in call.flat()), score_mod=score, scale=call.scale)
    return _unfold(call.unflat(out), call.front, call.n)


def retro_pytorch(query, key, value, *, chunk_len, neighbour_mask=None, query_start=0) -> Tensor:
    """retro-pytorch's module as the op without positions: projections
    are the identity, no null key, rotary angles of zero.
    """
    h, d = query.shape[2:]
    module = _retro_pytorch(chunk_len, h, d)
    mask = (
        None if neighbour_mask is None else neighbour_mask.reshape(*neighbour_mask.shape[:3], -1).expand(*key.shape[:4])
    )
    context = torch.cat([key.flatten(-2), value.flatten(-2)], -1)
    angles = [query.new_zeros(1, 1, length, 2) for length in (chunk_len, key.shape[3])]
    return module(query.flatten(2), context=context, context_mask=mask, pos_emb=angles).unflatten(2, (h, d))


def retro_pytorch_package():
    """`retro_pytorch.retro_pytorch`, with a stand-in for its index builder, autofaiss, which pins old versions."""
    stand_in = types.ModuleType("autofaiss")
    stand_in.build_index = None
    sys.modules.setdefault("autofaiss", stand_in)
    return importlib.import_module("retro_pytorch.retro_pytorch")


@functools.lru_cache(maxsize=4)
def _retro_pytorch(chunk_len: int, heads: int, width: int):
    inner = heads * width
    module = retro_pytorch_package().ChunkedCrossAttention(chunk_len, dim=inner, dim_head=width, heads=heads)
    attention = module.cross_attn
    attention.null_k = attention.null_v = None
    attention.to_q = attention.to_out = torch.nn.Identity()
    attention.to_k, attention.to_v = _Part(slice(0, inner)), _Part(slice(inner, 2 * inner))
    return module


class _Part(torch.nn.Module):
    """One half of the context, which holds keys and values side by side."""

    def __init__(self, part: slice):
        super().__init__()
        self.part = part

    def forward(self, context: Tensor) -> Tensor:
        return context[..., self.part]


eager_compiled = CompiledTwin(eager)
