"""Caches of models that retrieve while they decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retro_model.base import checks, transfer
from retro_model.layers import KeyValueCache

from .config import RetroConfig


def completed(position: int, count: int, chunk_len: int) -> int:
    """Count the chunks that `count` more columns complete in a row that holds `position` tokens.

    position -s: the first s of these columns are padding.
    """
    return max(position + count, 0) // chunk_len - max(position, 0) // chunk_len


def left_mask(starts: Sequence[int], columns: int, device: torch.device) -> Tensor:
    """Return bool [B,columns], False before each row's first token."""
    return torch.arange(columns, device=device) >= transfer.numbers(starts, device)[:, None]


class NeighbourKeys:
    """Cache of one layer's chunked cross-attention, for the neighbours of each row's last complete chunk.

    It holds keys and values [B,K,R,G,D] and relative keys [H,M+R-1,D]. It does not grow with the sequence, because a
    later token attends no earlier chunk's neighbours.
    """

    def __init__(self):
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.rel_key: Tensor | None = None

    def hold(self, batch: int, rows: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Store keys and values [B',K,R,G,D] of B' of `batch` rows."""
        if self.keys is None:
            self.keys, self.values = (t.new_zeros(batch, *t.shape[1:]) for t in (key, value))
        self.keys[rows], self.values[rows] = key, value


class ChunkCache:
    """Base of caches of B sequences: each row's position in its chunks, and the neighbours in use.

        encoder conditioning  activations of layer min(P) of the incomplete chunk, [B,M,d]
        cross-attention       `NeighbourKeys` of each layer with chunked cross-attention, and their mask [B,K,R]

    Sequences of different lengths end in the same column, so their chunks complete in different calls.

    Args:
        config: the model's.
        batch: B.
        capacity: maximum number of tokens of a sequence; None: config.max_len.
    """

    def __init__(self, config: RetroConfig, batch: int, capacity: int | None = None):
        capacity = config.max_len if capacity is None else capacity
        checks.integer("batch", batch, low=1)
        checks.integer("capacity", capacity, low=1)
        if capacity > config.max_len:
            raise ValueError(f"capacity: expected at most max_len = {config.max_len} tokens; got {capacity}")
        self.config, self.batch, self.capacity = config, batch, capacity
        self.length = 0  # columns filled
        self.starts = [0] * batch  # column of each row's first token
        self._mask: Tensor | None = None  # `key_mask` of all columns
        self.chunk: Tensor | None = None  # [B,M,d]; the first `position % M` of each row are filled
        self.neighbours = {layer: NeighbourKeys() for layer in config.cca_layers}  # layers counted from 1
        self.neighbour_mask: Tensor | None = None  # bool [B,K,R]; None until a call passes neighbours
        self.layers: list[KeyValueCache] = []  # one cache per self-attention

    @property
    def positions(self) -> list[int]:
        """Number of tokens that each row holds; -s if the first s columns of the next call are padding."""
        return [self.length - start for start in self.starts]

    def completes(self, count: int) -> int:
        """Return the most chunks that `count` more tokens complete in a row: the L of the next call's neighbours."""
        m = self.config.chunk_len
        return max(completed(p, count, m) for p in self.positions)

    def key_mask(self, count: int, device: torch.device) -> Tensor | None:
        """Return bool [B,S], False before each row's first token; None if all rows begin in column 0.

        S = length + count; for a single token the capacity, as in `KeyValueCache.extend`.
        """
        if not any(self.starts):
            return None
        if self._mask is None or self._mask.device != device:
            self._mask = left_mask(self.starts, self.capacity, device)
        return self._mask if count == 1 else self._mask[:, : self.length + count]

    def pad(self, starts: Sequence[int]) -> None:
        """Set the columns in which the rows of the first call begin."""
        if self.length:
            raise ValueError(
                f"token_mask: expected None where the cache holds tokens; got a mask after {self.length} columns"
            )
        self.starts, self._mask = list(starts), None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        parts = [self, *self.neighbours.values(), *self.layers]
        return sum(t.nbytes for part in parts for t in vars(part).values() if isinstance(t, Tensor))


class RetroCache(ChunkCache):
    """Cache of a Retro that decodes: a `ChunkCache` with a `KeyValueCache` for each layer's self-attention.

    A cache belongs to one batch of sequences. `model(tokens, neighbours, cache=cache)` appends one token or several.

    Example:
        cache = RetroCache(model.config, batch=2)
        logits = model(prompt, neighbours, cache=cache)  # neighbours of the prompt's complete chunks
        logits = model(token, cache=cache)               # [2,1] more; with neighbours where cache.completes(1) is 1

    Calls with a cache are not differentiable. The first call allocates the memory, in the keys' type. A call that
    raises leaves the cache unusable.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 ("Sampling").
    """

    def __init__(self, config: RetroConfig, batch: int, capacity: int | None = None):
        super().__init__(config, batch, capacity)
        self.layers = [KeyValueCache(self.capacity) for _ in range(config.num_layers)]
