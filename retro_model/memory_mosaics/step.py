"""One token of every row, as a function of tensors that stay where they are: what a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cache import ContextualState, MosaicsCache, PersistentState, Scalars


class MosaicsStep:
    """A Memory Mosaic's step of one token a row, which asks the host nothing.

    The cache's memories move into rings: the pair that is stored as number i lies in column i % room. There are no
    positions, so the order in which a read meets pairs does not matter, and a full ring forgets the oldest.

    Args:
        model: a `MemoryMosaics` in evaluation mode.
        cache: holds the prompts; one with a capacity, that forgets the oldest pairs. The step goes on from there by
            itself: the cache stays as it is.

    Raises:
        ValueError: a cache that is empty or grows, or forgets other pairs than the oldest.
    """

    def __init__(self, model, cache: MosaicsCache):
        if cache.evict != "oldest" or cache.capacity is None or not cache.length:
            raise ValueError(
                "cache: expected one with tokens and a capacity, that forgets the oldest pairs; got "
                f"{cache.length} tokens, capacity={cache.capacity}, evict={cache.evict!r}"
            )
        self.model = model
        device = model.embedding.weight.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        held = cache.contextual[0]
        there = held.present if held.present is not None else torch.ones_like(held.keys[:, :, 0, 0], dtype=torch.bool)
        #: pairs that each row's memories have been given, as far as they still matter
        self.count = there[:, held.first : held.end].sum(1)
        # a step reads what is held and the pair that it stores itself, and only then is cut
        self.contextual = [PairRing(state, self.count, cache.capacity + 1) for state in cache.contextual]
        self.persistent = [KeptAverage(state) for state in cache.persistent]

    def begin(self) -> str:
        """Return the name of the only way."""
        return "reads"

    def run(self, way: str) -> Tensor:
        """Logits [B,V] after `tokens` [B,1]; on the device alone."""
        x = self.model.embedding(self.tokens)
        for block, *states in zip(self.model.blocks, self.contextual, self.persistent):
            x = block(x, None, states)
        self.count += 1
        return self.model.readout(self.model.norm(x)[:, -1])

    def finish(self) -> None:
        """No-op: the host keeps no counters."""


class KeptAverage(Scalars):
    """A persistent memory's average, in memory of its own."""

    def __init__(self, state: PersistentState):
        super().__init__(state.scalars)
        self.average = state.average.clone()

    def keep(self, average: Tensor) -> None:
        self.average.copy_(average)


class PairRing(Scalars):
    """One layer's memories, with the same interface as `ContextualState`."""

    def __init__(self, state: ContextualState, count: Tensor, room: int):
        super().__init__(state.scalars)
        self.count, self.room = count, room
        self.average, self.last_key, self.last_projected = (
            t.clone() for t in (state.average, state.last_key, state.last_projected)
        )
        self.row = torch.arange(len(count), device=count.device)
        # the pairs that a row holds end in the last column: row by row they move to the first ones
        column = torch.arange(room, device=count.device)
        source = (state.end - count[:, None] + column).clamp(max=state.keys.shape[1] - 1)
        self.keys, self.values = (
            torch.where((column < count[:, None])[..., None, None], t[self.row[:, None], source], 0)
            for t in (state.keys, state.values)
        )

    def store(
        self, average: Tensor, key: Tensor, projected: Tensor, values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict]:
        """Takes in a token [B,1,h,hd]: the pair of the last one is known now. A read sees it and those before it."""
        at = (self.row, self.count % self.room)
        self.keys[at] = self.last_key[:, 0].to(self.keys.dtype)
        self.values[at] = values(torch.cat([self.last_projected, projected], 1))[:, 0].to(self.values.dtype)
        for held, new in ((self.average, average[:, -1]), (self.last_key, key), (self.last_projected, projected)):
            held.copy_(new)
        return self.keys, self.values, {"query_offset": self.count.clamp(max=self.room - 1)}

    def settle(self, query: Tensor, lse: Tensor) -> None:
        """The next pair takes the oldest one's place."""
