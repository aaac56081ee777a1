"""What a Retro keeps while it decodes, and the forward pass that uses it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from retro_model import checks

from .config import RetroConfig


class RetroCache:
    """Keys and values of the tokens so far, and what chunked cross-attention needs of the last chunks.

    A cache belongs to one batch of sequences and is filled by `model(tokens, neighbours, cache=cache)`, one token or a block at
    a time. It holds, for B sequences,

        self-attention       keys and values [B,capacity,H,D] of each layer; relative keys [H,capacity,D], projected once
        encoder conditioning the activations of layer min(P) of the incomplete chunk, [B,M,d]
        cross-attention      keys and values [B,K,R,H,D] of the last complete chunk's neighbours of each CCA layer: a later
                             token attends no earlier chunk, so what they take does not grow with the sequence

    Sequences of different lengths share a cache by ending in the same column (`RetroCache.join`): as positions are relative,
    each row's tokens still stand at the right displacements, and its chunks complete at their own time.

    Example:
        cache = RetroCache(model.config, batch=2)
        logits = model(prompt, neighbours, cache=cache)  # neighbours of the prompt's complete chunks
        logits = model(token, cache=cache)               # [2,1] more; with neighbours where cache.completes(1) is 1

    Args:
        config: the model's.
        batch: B.
        capacity: most tokens a sequence can have; None: config.max_len.

    Calls with a cache are not differentiable. Memory is taken at the first call, in the type the keys then have.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 ("Sampling").
    """

    def __init__(self, config: RetroConfig, batch: int, capacity: int | None = None):
        capacity = config.max_len if capacity is None else capacity
        for name, value in (("batch", batch), ("capacity", capacity)):
            checks.integer(name, value, low=1)
        if capacity > config.max_len:
            raise ValueError(f"capacity: expected at most max_len = {config.max_len} tokens; got {capacity}")
        self.config, self.batch, self.capacity = config, batch, capacity
        self.length = 0  # columns filled
        self.starts = [0] * batch  # the column of each row's first token
        self.keys: dict[int, Tensor] = {}  # by layer, from 0: [B,capacity,H,D]
        self.values: dict[int, Tensor] = {}
        self.rel_keys: dict[int, Tensor] = {}  # [H,capacity,D], row t for displacement t
        self.chunk: Tensor | None = None  # [B,M,d], of which the first `phase` of each row are filled
        self.neighbour_keys: dict[int, Tensor] = {}  # [B,K,R,H,D]
        self.neighbour_values: dict[int, Tensor] = {}
        self.cross_rel_keys: dict[int, Tensor] = {}  # [H,M+R-1,D]
        self.neighbour_mask: Tensor | None = None  # bool [B,K,R]; None until neighbours were given

    @property
    def positions(self) -> list[int]:
        """Tokens that each row holds."""
        return [self.length - start for start in self.starts]

    def completes(self, count: int) -> int:
        """Chunks that `count` more tokens complete, in the row where they complete the most: the L of the next call's neighbours."""
        m = self.config.chunk_len
        return max((p % m + count) // m for p in self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        single = [t for t in (self.chunk, self.neighbour_mask) if t is not None]
        tables = (self.keys, self.values, self.rel_keys, self.neighbour_keys, self.neighbour_values, self.cross_rel_keys)
        return sum(t.nbytes for t in [*single, *(t for table in tables for t in table.values())])

    @classmethod
    def join(cls, caches: list[RetroCache], capacity: int | None = None) -> RetroCache:
        """One cache of all rows, in order, moved so that all end in the same column.

        Raises:
            ValueError: caches of different models, or whose neighbours differ in K or R; too small a capacity.
        """
        if not caches:
            raise ValueError("caches: expected at least one; got none")
        first = caches[0]
        if any(c.config != first.config for c in caches):
            raise ValueError("caches: expected caches of one configuration; got several")
        shapes = {tuple(c.neighbour_mask.shape[1:]) for c in caches if c.neighbour_mask is not None}
        if len(shapes) > 1:
            raise ValueError(f"caches: expected neighbours of one [K,R]; got {sorted(shapes)}")
        joined = cls(first.config, sum(c.batch for c in caches), capacity)
        joined.length = max(c.length for c in caches)
        if joined.length > joined.capacity:
            raise ValueError(f"capacity: expected at least the {joined.length} tokens held; got {joined.capacity}")
        joined.starts = [start + joined.length - c.length for c in caches for start in c.starts]
        for name in ("keys", "values"):
            table = getattr(joined, name)
            for layer, sample in getattr(first, name).items():
                table[layer] = sample.new_zeros(joined.batch, joined.capacity, *sample.shape[2:])
                for rows, cache in joined._parts(caches):
                    table[layer][rows, joined.length - cache.length : joined.length] = getattr(cache, name)[layer][:, : cache.length]
        joined.chunk = None if first.chunk is None else torch.cat([c.chunk for c in caches])
        joined._join_neighbours(caches)
        return joined

    def _parts(self, caches: list[RetroCache]):
        first = 0
        for cache in caches:
            yield slice(first, first + cache.batch), cache
            first += cache.batch

    def _join_neighbours(self, caches: list[RetroCache]) -> None:
        shape = next((c.neighbour_mask.shape[1:] for c in caches if c.neighbour_mask is not None), None)
        if shape is None:
            return
        device = next(iter(self.keys.values())).device
        self.neighbour_mask = torch.zeros(self.batch, *shape, dtype=torch.bool, device=device)
        for rows, cache in self._parts(caches):
            self.cross_rel_keys |= cache.cross_rel_keys
            if cache.neighbour_mask is not None:
                self.neighbour_mask[rows] = cache.neighbour_mask
            for layer, key in cache.neighbour_keys.items():
                self.hold(layer, rows, key, cache.neighbour_values[layer])

    def hold(self, layer: int, rows: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values [B',K,R,H,D] of the last complete chunk's neighbours of some rows."""
        for table, new in ((self.neighbour_keys, key), (self.neighbour_values, value)):
            if layer not in table:
                table[layer] = new.new_zeros(self.batch, *new.shape[1:])
            table[layer][rows] = new


class _Group(NamedTuple):
    """Rows of a call that stand at the same place in their chunk, so that one call of the kernel serves them."""

    rows: Tensor | slice
    phase: int  # tokens of the incomplete chunk before the call
    held: bool  # whether the first token still attends the neighbours held for the last complete chunk
    completed: int  # chunks that complete within the call


class CachedCall:
    """One call of a model with a cache: the attentions that read and write it, in the order of the forward pass.

    Args:
        cache: what is held; `finish` advances it.
        count: N, new tokens.
        neighbours: [B,L,K,R] with L = cache.completes(N); a row that completes fewer chunks uses its first ones. None: none.
        neighbour_mask: bool [B,L,K] or [B,L,K,R].
    """

    def __init__(self, cache: RetroCache, count: int, neighbours: Tensor | None, neighbour_mask: Tensor | None, device: torch.device):
        self.cache, self.count, self.device = cache, count, device
        self.end = cache.length + count
        if neighbours is None and cache.neighbour_mask is not None and cache.completes(count):
            # chunks that complete without neighbours: theirs are missing
            neighbours = torch.zeros(cache.batch, cache.completes(count), *cache.neighbour_mask.shape[1:], dtype=torch.int64, device=device)
            neighbour_mask = torch.zeros_like(neighbours, dtype=torch.bool)
        if neighbours is not None and neighbour_mask is None:
            neighbour_mask = torch.ones_like(neighbours, dtype=torch.bool)
        if neighbours is not None and neighbour_mask.dim() == 3:
            neighbour_mask = neighbour_mask.unsqueeze(-1).expand(neighbours.shape)
        self.neighbours, self.neighbour_mask = neighbours, neighbour_mask
        if neighbours is not None and cache.neighbour_mask is None:
            cache.neighbour_mask = torch.zeros(cache.batch, *neighbours.shape[2:], dtype=torch.bool, device=device)
        self.retrieves = cache.neighbour_mask is not None
        self.groups = self._groups()
        self.encoded: list[Tensor | None] = [None] * len(self.groups)
        self.key_mask = None
        if any(cache.starts):
            self.key_mask = torch.arange(self.end, device=device) >= torch.tensor(cache.starts, device=device)[:, None]

    def _groups(self) -> list[_Group]:
        m = self.cache.config.chunk_len
        members: dict[tuple[int, bool], list[int]] = {}
        for row, position in enumerate(self.cache.positions):
            phase = position % m
            members.setdefault((phase, position >= m and phase < m - 1), []).append(row)
        whole = len(members) == 1
        return [
            _Group(slice(None) if whole else torch.tensor(rows, device=self.device), phase, held, (phase + self.count) // m)
            for (phase, held), rows in members.items()
        ]

    def attend(self, index: int, attention, x: Tensor) -> Tensor:
        """Layer `index`'s causal attention of x [B,N,d] to all tokens so far."""
        cache = self.cache
        key, value = attention.project(x)
        if index not in cache.keys:
            shape = (cache.batch, cache.capacity, *key.shape[2:])
            cache.keys[index], cache.values[index] = key.new_zeros(shape), value.new_zeros(shape)
        if index not in cache.rel_keys:
            cache.rel_keys[index] = attention.positions(0, cache.capacity)
        cache.keys[index][:, cache.length : self.end] = key
        cache.values[index][:, cache.length : self.end] = value
        return attention.attend(
            x, cache.keys[index][:, : self.end], cache.values[index][:, : self.end], cache.rel_keys[index][:, : self.end], 0,
            query_offset=cache.length, key_mask=self.key_mask,
        )  # fmt: skip

    def encode(self, encoder, x: Tensor) -> None:
        """Encode the neighbours of the chunks that complete, conditioned on x [B,N,d] and on what is held of their beginnings."""
        cache, m = self.cache, self.cache.config.chunk_len
        if cache.chunk is None:
            cache.chunk = x.new_zeros(cache.batch, m, x.shape[-1])
        for i, (rows, phase, _, completed) in enumerate(self.groups):
            hidden = torch.cat([cache.chunk[rows, :phase], x[rows]], 1)
            rest = hidden[:, completed * m :]
            cache.chunk[rows, : rest.shape[1]] = rest
            if completed and self.neighbours is not None:
                chunks = hidden[:, : completed * m].unflatten(1, (completed, m))
                mask = self.neighbour_mask[rows, :completed]
                self.encoded[i] = encoder(self.neighbours[rows, :completed], chunks, neighbour_mask=mask)

    def cross_attend(self, index: int, cca, x: Tensor) -> Tensor:
        """Layer `index`'s chunked cross-attention of x [B,N,d]."""
        if index not in self.cache.cross_rel_keys:
            self.cache.cross_rel_keys[index] = cca.relative_keys(self.cache.neighbour_mask.shape[-1])
        updates = [self._cross_attend(group, encoded, index, cca, x[group.rows]) for group, encoded in zip(self.groups, self.encoded)]
        if len(updates) == 1 and updates[0] is not None:
            return updates[0]
        total = torch.zeros_like(x)
        for group, update in zip(self.groups, updates):
            if update is not None:
                total[group.rows] = update.to(total.dtype)
        return total

    def _cross_attend(self, group: _Group, encoded: Tensor | None, index: int, cca, x: Tensor) -> Tensor | None:
        """The update of one group's rows x [B',N,d]; None where no token attends anything."""
        cache, rows = self.cache, group.rows
        held = group.held and index in cache.neighbour_keys  # before any neighbours were given there are none to hold
        keys, values, masks = [], [], []
        if held:
            keys.append(cache.neighbour_keys[index][rows].unsqueeze(1))
            values.append(cache.neighbour_values[index][rows].unsqueeze(1))
            masks.append(cache.neighbour_mask[rows].unsqueeze(1))
        if encoded is not None:
            for parts, new in zip((keys, values), cca.project(encoded)):
                parts.append(new)
            masks.append(self.neighbour_mask[rows, : group.completed])
        if not keys:
            return None
        key, value, mask = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (keys, values, masks))
        if encoded is not None:
            cache.hold(index, rows, key[:, -1], value[:, -1])
        query_start = group.phase + (cache.config.chunk_len if held else 0)  # chunk 0 of the call is the one held
        return cca.attend(x, key, value, cache.cross_rel_keys[index], neighbour_mask=mask, query_start=query_start)

    def finish(self) -> None:
        """The new tokens and chunks become part of what is held."""
        cache = self.cache
        cache.length = self.end
        if self.neighbours is not None:
            for rows, _, _, completed in self.groups:
                if completed:
                    cache.neighbour_mask[rows] = self.neighbour_mask[rows, completed - 1]


@torch.no_grad()
def decode(model, tokens: Tensor, neighbours: Tensor | None, neighbour_mask: Tensor | None, cache: RetroCache) -> Tensor:
    """Final activations [B,N,d] of new tokens; the arguments are those of `Retro.forward`, checked. A call that fails halfway
    leaves the cache unusable."""
    call = CachedCall(cache, tokens.shape[1], neighbours, neighbour_mask, tokens.device)
    x = model.embedding(tokens)
    for index, layer in enumerate(model.layers):
        x = layer.residual(layer.attention_norm, partial(call.attend, index, layer.attention), x)
        if model.encoder is not None and index + 1 == model.config.cca_layers[0]:
            call.encode(model.encoder, x)
        if layer.cca is not None and call.retrieves:
            x = layer.residual(layer.cca_norm, partial(call.cross_attend, index, layer.cca), x)
        x = layer.residual(layer.feed_forward_norm, layer.feed_forward, x)
    call.finish()
    return model.norm(x)
