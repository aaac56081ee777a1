"""Decode step of one token a row, over tensors at fixed addresses, for capture in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cache import ContextualState, MosaicsCache, PersistentState, Scalars


class MosaicsStep:
    """Decode step of a Memory Mosaic, without synchronisation.

    The step copies the cache's memories into ring buffers: pair i is in column i % room. A full ring overwrites the
    oldest pair. The order of pairs has no effect on a read, because the model has no positions.

    Args:
        model: a `MemoryMosaics` in evaluation mode.
        cache: holds the prompts; it must have a capacity and evict the oldest pairs. The step does not change it.

    Raises:
        ValueError: the cache is empty, has no capacity or evicts other pairs.
    """

    def __init__(self, model, cache: MosaicsCache):
        if cache.evict != "oldest" or cache.capacity is None or not cache.length:
            got = f"{cache.length} tokens, capacity={cache.capacity}, evict={cache.evict!r}"
            raise ValueError(f"cache: expected one with tokens and a capacity, that evicts the oldest pairs; got {got}")
        self.model = model
        device = model.embedding.weight.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        held = cache.contextual[0]
        there = torch.ones_like(held.keys[:, :, 0, 0], dtype=torch.bool) if held.present is None else held.present
        #: pairs stored in each row's memories, up to the capacity at first
        self.count = there[:, held.first : held.end].sum(1)
        # + 1: a step reads the held pairs and the one it stores, before it evicts
        self.contextual = [PairRing(state, self.count, cache.capacity + 1) for state in cache.contextual]
        self.persistent = [KeptAverage(state) for state in cache.persistent]

    def begin(self) -> str:
        """Return the name of the step's only way."""
        return "reads"

    def run(self, way: str) -> Tensor:
        """Return logits [B,V] after `tokens` [B,1], without synchronisation."""
        x = self.model.embedding(self.tokens)
        for block, *states in zip(self.model.blocks, self.contextual, self.persistent):
            x = block(x, None, states)
        self.count += 1
        return self.model.readout(self.model.norm(x)[:, -1])

    def finish(self) -> None:
        """No-op: the host keeps no counters."""


class KeptAverage(Scalars):
    """State of a persistent memory with its average at a fixed address."""

    def __init__(self, state: PersistentState):
        super().__init__(state.scalars)
        self.average = state.average.clone()

    def store(self, average: Tensor) -> None:
        self.average.copy_(average)


class PairRing(Scalars):
    """Ring buffer of one layer's pairs, with the interface of `ContextualState`."""

    def __init__(self, state: ContextualState, count: Tensor, room: int):
        super().__init__(state.scalars)
        self.count, self.room = count, room
        self.average, self.last_key, self.last_projected = (
            t.clone() for t in (state.average, state.last_key, state.last_projected)
        )
        self.row = torch.arange(len(count), device=count.device)
        # move each row's pairs, which end in the last column, to the first columns
        column = torch.arange(room, device=count.device)
        source = (state.end - count[:, None] + column).clamp(max=state.keys.shape[1] - 1)
        self.keys, self.values = (
            torch.where((column < count[:, None])[..., None, None], t[self.row[:, None], source], 0)
            for t in (state.keys, state.values)
        )

    def store(
        self, average: Tensor, key: Tensor, projected: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict]:
        """Append a token [B,1,h,hd], which completes the last token's pair. A read sees that pair and earlier ones."""
        at = (self.row, self.count % self.room)
        self.keys[at] = self.last_key[:, 0].to(self.keys.dtype)
        self.values[at] = values(torch.cat([self.last_projected, projected], 1))[:, 0].to(self.values.dtype)
        for held, new in ((self.average, average[:, -1]), (self.last_key, key), (self.last_projected, projected)):
            held.copy_(new)
        return self.keys, self.values, {"query_offset": self.count.clamp(max=self.room - 1)}

    def settle(self, query: Tensor, lse: Tensor) -> None:
        """No-op: the next pair overwrites the oldest one."""
