"""One forward pass of a decoder that attends neighbours with its own projections: what its layers read and attend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import retro_kernels as rk
from retro_model.base import transfer


class Reading:
    """The pass in which the decoder reads neighbours: keeps the keys and values of each attending layer, without those
    of the first token. See `attention_hook.LayerPass`."""

    def __init__(self, layers: dict[int, int], into: Tensor):
        self.layers, self.into = layers, into  # [U,A,2,R,G,D]

    def attend(self, place: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> None:
        """The attention itself stays the decoder's."""
        self.into[:, place, 0], self.into[:, place, 1] = key[:, 1:], value[:, 1:]


class Slots(NamedTuple):
    """Where a pass finds the neighbours of each chunk that its tokens attend.

    Slot t of row b is one chunk: the row's last complete chunk before the call where a cache holds its neighbours, then
    those that complete within the call.

    query_start: position of the first column, counted in slots: an int, or int64 [B] where rows differ.
    place: int64 [B,T,K], which states of the pool each neighbour has. mask: bool [B,T,K,R].
    last: int64 [B], the slot of each row's last complete chunk after the call; None: as before the call.
    """

    query_start: int | Tensor
    place: Tensor
    mask: Tensor
    last: Tensor | None


def slots(
    first: Sequence[int],
    count: int,
    m: int,
    place: Tensor,
    mask: Tensor,
    held_place: Tensor | None = None,
    held_mask: Tensor | None = None,
) -> Slots:
    """Lays out the chunks that `count` columns attend; rows begin at positions `first` (-s: s columns of padding).

    place, mask: [B,L,K] and [B,L,K,R] of the chunks that complete within the call; L may be 0.
    held_place, held_mask: [B,K] and [B,K,R] of each row's last complete chunk before the call.
    """
    lead, device = int(held_place is not None), mask.device
    chunk = [f // m for f in first]  # of each row's first column; negative on padding
    begin = [f % m + m * lead for f in first]
    query_start = begin[0] if len(set(begin)) == 1 else transfer.numbers(begin, device)
    total = (max(begin) + count) // m
    complete = [max(f + count, 0) // m - max(f, 0) // m for f in first]
    if not lead and not any(chunk) and len(set(complete)) == 1:  # whole rows
        return Slots(
            query_start, place[:, :total], mask[:, :total], torch.full((len(first),), total - 1, device=device)
        )
    shift = transfer.numbers([lead - min(c, 0) for c in chunk], device)[:, None]
    number = torch.arange(total, device=device) - shift  # of the slot's chunk among those that complete in the call
    known = (number >= 0) & (number < transfer.numbers(complete, device)[:, None])
    if mask.shape[1]:
        rows, at = torch.arange(len(first), device=device)[:, None], number.clamp(0, mask.shape[1] - 1)
        place, mask = place[rows, at], mask[rows, at] & known[..., None, None]
    else:
        place, mask = (t.new_zeros(t.shape[0], total, *t.shape[2:]) for t in (place, mask))
    if lead:
        place[:, 0], mask[:, 0] = held_place, held_mask
    last = (transfer.numbers(complete, device) - 1 + shift[:, 0]).clamp(min=0) if any(complete) else None
    return Slots(query_start, place, mask, last)


class Attending:
    """The pass of a text, or of the tokens that follow what a cache holds. See `attention_hook.LayerPass`.

    It changes nothing that it holds, so that checkpointing may compute a layer again.

    Args:
        layers: layer, from 0 -> its place among those that attend.
        bias, scale: [A,H].
        pool: states [U,A,2,R,G,D].
        laid: where they are.
        turn: cosines and sines [1 or B,N,1,E] that turn a query to its place after a neighbour; None: none.
        key_mask: bool [B,S] of the text's own columns, or None.
    """

    def __init__(self, layers, bias, scale, pool, laid: Slots, turn, key_mask, chunk_len: int, backend, seconds: dict):
        self.layers, self.bias, self.scale, self.pool, self.laid = layers, bias, scale, pool, laid
        self.turn, self.key_mask, self.chunk_len, self.backend, self.seconds = (
            turn,
            key_mask,
            chunk_len,
            backend,
            seconds,
        )

    def attend(self, place: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """[B,N,H,D]: one softmax over the text's own keys and its neighbours'."""
        began = time.perf_counter()
        if self.key_mask is not None and key.shape[1] != self.key_mask.shape[1] and window is None:
            raise ValueError(
                f"past_key_values: expected keys of the {self.key_mask.shape[1]} columns so far; got {key.shape[1]}"
            )
        common = {"scale": scale, "return_lse": True, "backend": self.backend}
        key_mask = None if self.key_mask is None else self.key_mask[:, -key.shape[1] :]
        own = rk.relative_attention(query, key, value, causal=True, window=window, key_mask=key_mask, **common)
        near = rk.chunked_cross_attention(
            self._turned(query),
            *self._states(place),
            chunk_len=self.chunk_len,
            neighbour_mask=self.laid.mask,
            query_start=self.laid.query_start,
            **common,
        )
        scaled = (near[0] * self.scale[place, :, None]).to(own[0].dtype)
        out, _ = merge_attention((own[0], scaled), (own[1], near[1] + self.bias[place, :, None]))
        self.seconds["attention"] += time.perf_counter() - began
        return out

    def _turned(self, query: Tensor) -> Tensor:
        if self.turn is None:
            return query
        cos, sin = self.turn
        width = cos.shape[-1]
        part, rest = query[..., :width], query[..., width:]
        low, high = part.chunk(2, -1)
        turned = (part * cos + torch.cat((-high, low), -1) * sin).to(query.dtype)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    def _states(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B,T,K,R,G,D]."""
        where = self.laid.place
        states = self.pool[:, place].index_select(0, where.flatten()).unflatten(0, where.shape)
        return states.unbind(3)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stands in for `rk.merge_attention`."""
    stacked = torch.stack(tuple(lses))
    highest = stacked.detach().amax(0).clamp(min=torch.finfo(stacked.dtype).min)
    shares = (stacked - highest).exp()
    total = shares.sum(0)
    weights = shares / total.clamp(min=torch.finfo(stacked.dtype).tiny)
    out = sum(o * w.transpose(1, 2).unsqueeze(-1) for o, w in zip(outs, weights))
    return out.to(outs[0].dtype), highest + total.log()
