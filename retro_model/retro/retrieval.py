"""Retrieval within one call of a model: encode the neighbours of chunks that complete, and attend them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retro_model.base import checks, transfer
from retro_model.layers import ChunkedCrossAttention

from .cache import ChunkCache, NeighbourKeys
from .encoder import NeighbourEncoder

#: Encodings [B',L,K,R,d'] of each group's neighbours; None for a group without neighbours.
Encoded = list[Tensor | None]


class Group(NamedTuple):
    """Rows of a call at the same position in their chunk, which one call of the op serves."""

    rows: Tensor | slice
    first: int  # column of their first token in this call, after the padding on the left
    phase: int  # tokens of the incomplete chunk before the call
    held: bool  # whether the first token attends the neighbours that the cache holds of the last complete chunk
    completed: int  # chunks that complete within the call


class Retrieval:
    """Neighbours of one call: of a whole sequence (no cache), of tokens after a cache's, or of a retrofitted decoder's.

    Args:
        encoder: encodes the neighbours.
        tokens: [B,N], the call's.
        neighbours: [B,L,K,R] of the L chunks that complete in the row with the most; a row that completes fewer uses
            its first ones. None: no neighbours.
        neighbour_mask: bool [B,L,K] or [B,L,K,R], or None.
        starts: column of each row's first token, in a call without a cache; None: 0.
        cache: state after the earlier calls; `finish` advances it.
    """

    def __init__(
        self, encoder: NeighbourEncoder, tokens: Tensor, neighbours, neighbour_mask, *, starts=None, cache=None
    ):
        self.encoder, self.cache, self.count, self.device = encoder, cache, tokens.shape[1], tokens.device
        self.neighbours, self.neighbour_mask = neighbours, neighbour_mask
        if cache is not None:
            self._fill_from(cache)
        self.retrieves = self.neighbours is not None or (cache is not None and cache.neighbour_mask is not None)
        self.groups = self._groups([-s for s in starts or [0] * len(tokens)] if cache is None else cache.positions)

    def _fill_from(self, cache: ChunkCache) -> None:
        """Expand the mask to [B,L,K,R]. Add masked neighbours for chunks that complete in a call without any."""
        if self.neighbours is None and cache.neighbour_mask is not None and (chunks := cache.completes(self.count)):
            shape = (cache.batch, chunks, *cache.neighbour_mask.shape[1:])
            self.neighbours = torch.zeros(shape, dtype=torch.int64, device=self.device)
            self.neighbour_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if self.neighbours is None:
            return
        self.neighbour_mask = checks.token_mask(self.neighbour_mask, self.neighbours)
        if cache.neighbour_mask is None:
            shape = (cache.batch, *self.neighbours.shape[2:])
            cache.neighbour_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)

    def _groups(self, positions: Sequence[int]) -> list[Group]:
        m = self.encoder.config.chunk_len
        members: dict[tuple[int, int, bool], list[int]] = {}
        for row, position in enumerate(positions):
            phase = max(position, 0) % m
            members.setdefault((max(-position, 0), phase, position >= m and phase < m - 1), []).append(row)
        groups = []
        for (first, phase, held), rows in members.items():
            index = slice(None) if len(members) == 1 else transfer.numbers(rows, self.device)
            groups.append(Group(index, first, phase, held, (phase + self.count - first) // m))
        return groups

    def encode(self, x: Tensor) -> Encoded:
        """Encode the neighbours of the chunks that complete, conditioned on x [B,N,d] and the cached part."""
        m, cache = self.encoder.config.chunk_len, self.cache
        if cache is not None and cache.chunk is None:
            cache.chunk = x.new_zeros(cache.batch, m, x.shape[-1])
        encoded: Encoded = []
        for rows, first, phase, _, completed in self.groups:
            hidden = x[rows, first:]
            if cache is not None:
                hidden = torch.cat([cache.chunk[rows, :phase], hidden], 1)
                rest = hidden[:, completed * m :]
                cache.chunk[rows, : rest.shape[1]] = rest
            if not completed or self.neighbours is None:
                encoded.append(None)
                continue
            chunks, mask = hidden[:, : completed * m].unflatten(1, (completed, m)), self._mask(rows, completed)
            encoded.append(self.encoder(self.neighbours[rows, :completed], chunks, neighbour_mask=mask))
        return encoded

    def _mask(self, rows: Tensor | slice, chunks: int) -> Tensor | None:
        return None if self.neighbour_mask is None else self.neighbour_mask[rows, :chunks]

    def cross_attend(self, cca: ChunkedCrossAttention, x: Tensor, encoded: Encoded, layer: int) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d] by layer `layer`'s chunked cross-attention."""
        kept = None if self.cache is None else self.cache.neighbours[layer]
        updates = [self._cross_attend(group, cca, x, states, kept) for group, states in zip(self.groups, encoded)]
        if len(updates) == 1 and updates[0] is not None and not self.groups[0].first:
            return updates[0]
        total = torch.zeros_like(x)
        for group, update in zip(self.groups, updates):
            if update is not None:
                total[group.rows, group.first :] = update.to(total.dtype)
        return total

    def _cross_attend(self, group: Group, cca, x: Tensor, encoded: Tensor | None, kept: NeighbourKeys | None):
        """Return the update of one group's rows; None if no token attends anything."""
        rows, x = group.rows, x[group.rows, group.first :]
        key, value = (None, None) if encoded is None else cca.project(encoded)
        mask, query_start = self._mask(rows, group.completed), group.phase
        held = kept is not None and group.held and kept.keys is not None  # None: no neighbours so far
        if held:  # the cached chunk is chunk 0 of the op's call
            query_start += cca.chunk_len
            pairs = ((kept.keys, key), (kept.values, value), (self.cache.neighbour_mask, mask))
            key, value, mask = (_after(old[rows], None if encoded is None else new) for old, new in pairs)
        if key is None:
            return None
        rel_key = None if kept is None else kept.rel_key
        if rel_key is None:
            rel_key = cca.relative_keys(key.shape[3])
        if kept is not None:
            kept.rel_key = rel_key
            if encoded is not None:
                kept.hold(self.cache.batch, rows, key[:, -1], value[:, -1])
        return cca.attend(x, key, value, rel_key, neighbour_mask=mask, query_start=query_start)

    def finish(self) -> None:
        """Store the mask of the last complete chunk's neighbours in the cache, next to their keys."""
        if self.neighbours is not None:
            for rows, _, _, _, completed in self.groups:
                if completed:
                    self.cache.neighbour_mask[rows] = self.neighbour_mask[rows, completed - 1]


def _after(held: Tensor, new: Tensor | None) -> Tensor:
    """Concatenate the last complete chunk [B,...], as chunk 0, and the new chunks [B,L,...]."""
    held = held.unsqueeze(1)
    return held if new is None else torch.cat([held, new], 1)
