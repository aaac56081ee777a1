"""Cache of an RPT that decodes a document."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.base import checks

from .config import RPTConfig
from .index import SelfIndex
from .inputs import neighbour_count


class RPTCache:
    """Cache of B documents: the window's keys and values, the index of every chunk so far, the last chunk's neighbours.

        window      keys and values [B,2S,H,D] of each layer, a ring buffer: position p is in column p % 2S
        index       one `SelfIndex` a row: k_j and the encoded pair (j, j+1) of every chunk, [d] and [2m,d]
        gate        keys and values of every neighbour so far, K a chunk
        neighbours  keys and values [B,K,2m,H,D] of the last complete chunk's neighbours in each CCA layer

    Only index and gate grow with the document, by (2m+1)d and 2Kd numbers per chunk of m tokens. Rows may differ in
    length.

    Example:
        cache = model.make_cache(batch=2)
        logits = model(prompt, cache=cache)   # [2,N]
        logits = model(token, cache=cache)    # [2,1] more; a chunk that completes is encoded, searched with and added

    Args:
        config: the model's.
        batch: B.
        capacity: maximum number of tokens of a row; None: no limit.
        num_neighbours: K; None: config.num_neighbours. May exceed training's.

    Calls with a cache are not differentiable. A call that raises leaves the cache unusable.

    Source: arXiv 2306.13421, section 3.4.
    """

    def __init__(
        self,
        config: RPTConfig,
        batch: int,
        capacity: int | None = None,
        *,
        num_neighbours: int | None = None,
    ):
        checks.integer("batch", batch, low=1)
        if capacity is not None:
            checks.integer("capacity", capacity, low=1)
        self.config, self.batch, self.capacity = config, batch, capacity
        self.num_neighbours = neighbour_count(config, num_neighbours)
        self.positions = [0] * batch  # tokens that each row holds
        self.ring = 2 * config.segment if capacity is None else min(capacity, 2 * config.segment)
        self.retrieval: bool | None = None  # set by the first call; later calls must agree
        self.indexes = [SelfIndex() for _ in range(batch)]
        self.rows: dict[str, Tensor] = {}  # tensors with a row a document
        self.decoder = None  # a retrofitted decoder's own cache

    def completes(self, count: int) -> int:
        """Return the most chunks that `count` more tokens complete in a row: the L of the next call's `index`."""
        m = self.config.chunk_len
        return max((p % m + count) // m for p in self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(t.nbytes for t in self.rows.values()) + sum(index.nbytes for index in self.indexes)

    def row(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the tensor [B,*shape] of this name, at first zeros of `like`'s type. It grows to a larger shape[0]."""
        held = self.rows.get(name)
        if held is None:
            self.rows[name] = like.new_zeros(self.batch, *shape)
        elif held.shape[1] < shape[0]:
            self.rows[name] = torch.cat([held, held.new_zeros(self.batch, shape[0] - held.shape[1], *shape[1:])], 1)
        return self.rows[name]

    @classmethod
    def join(cls, caches: list[RPTCache], capacity: int | None = None) -> RPTCache:
        """Return one cache of all rows, in order.

        Raises:
            ValueError: the caches differ in configuration or K; the capacity is too small.
        """
        if not caches:
            raise ValueError("caches: expected at least one; got none")
        first = caches[0]
        if any((c.config, c.num_neighbours) != (first.config, first.num_neighbours) for c in caches):
            raise ValueError("caches: expected caches of one configuration and K; got several")
        joined = cls(first.config, sum(c.batch for c in caches), capacity, num_neighbours=first.num_neighbours)
        joined.positions = [p for c in caches for p in c.positions]
        if capacity is not None and max(joined.positions) > capacity:
            raise ValueError(f"capacity: expected at least the {max(joined.positions)} tokens held; got {capacity}")
        joined.retrieval = next((c.retrieval for c in caches if c.retrieval is not None), None)
        joined.indexes = [index for c in caches for index in c.indexes]
        for name in {n: None for c in caches for n in c.rows}:
            joined.rows[name] = torch.cat([joined._fitted(name, c, caches) for c in caches])
        return joined

    def _fitted(self, name: str, cache: RPTCache, caches: list[RPTCache]) -> Tensor:
        """Return a cache's rows of the joined tensor: rings moved to the new columns, others padded to the longest."""
        sample = next(c.rows[name] for c in caches if name in c.rows)
        held = cache.rows.get(name)
        if held is None:
            return sample.new_zeros(cache.batch, *sample.shape[1:])
        if not name.startswith("window"):
            longest = max(c.rows[name].shape[1] for c in caches if name in c.rows)
            return torch.cat([held, held.new_zeros(held.shape[0], longest - held.shape[1], *held.shape[2:])], 1)
        fitted = held.new_zeros(cache.batch, self.ring, *held.shape[2:])
        for row, p in enumerate(cache.positions):
            there = torch.arange(max(0, p - min(cache.ring, self.ring)), p, device=held.device)
            fitted[row, there % self.ring] = held[row, there % cache.ring]
        return fitted
