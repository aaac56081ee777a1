"""Key/value cache of a causal attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values [B,capacity,G,D] of the tokens so far, and relative keys [H,capacity,D], projected once.

    Memory is taken at the first call, in the type the keys then have. Rows of different lengths end in the same column
    (`join`): as positions are relative, each row's tokens still stand at the right displacements; what lies before a
    row's first token is masked by who attends.

    Args:
        capacity: columns.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.rel_keys: Tensor | None = None  # row t for displacement t

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int | Tensor]:
        """Takes in keys and values [B,N,G,D]; gives those to attend [B,S,G,D], and the position of the first new one.

        For a single token S is the capacity: every step then has the same shapes, and causal attention sees no key
        after its position.
        """
        if self.keys is None:
            shape = (key.shape[0], self.capacity, *key.shape[2:])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        first, self.length = self.length, self.length + key.shape[1]
        self.keys[:, first : self.length] = key
        self.values[:, first : self.length] = value
        seen = self.capacity if key.shape[1] == 1 else self.length
        return self.keys[:, :seen], self.values[:, :seen], first

    def relative_keys(self, positions: Callable[[int, int], Tensor], count: int) -> Tensor:
        """[H,count,D] of displacements from 0 on, from `positions(first, count)` the first time."""
        if self.rel_keys is None:
            self.rel_keys = positions(0, self.capacity)
        return self.rel_keys[:, :count]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [t for t in (self.keys, self.values, self.rel_keys) if t is not None]

    def at(self, column: Tensor) -> StepKeys:
        """For steps of one token, in the column that the device knows: int64 [B], the same for all rows."""
        return StepKeys(self, column)

    @classmethod
    def join(cls, caches: Sequence[KeyValueCache], capacity: int) -> KeyValueCache:
        """One cache of all rows, in order, moved so that all end in the same column."""
        joined = cls(capacity)
        joined.length = max(c.length for c in caches)
        if all(c.keys is not None for c in caches):
            joined.keys = torch.cat([_moved(c.keys, c.length, joined.length, capacity) for c in caches])
            joined.values = torch.cat([_moved(c.values, c.length, joined.length, capacity) for c in caches])
        return joined


class StepKeys:
    """A cache of keys and values for steps that are a function of tensors alone: same memory, same shapes each time."""

    def __init__(self, cache: KeyValueCache, column: Tensor):
        self.cache, self.column = cache, column
        self.relative_keys = cache.relative_keys

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take in keys and values [B,1,G,D]; see `KeyValueCache.extend`."""
        cache = self.cache
        for held, new in ((cache.keys, key), (cache.values, value)):
            held.index_copy_(1, self.column[:1], new.to(held.dtype))
        return cache.keys, cache.values, self.column


def _moved(held: Tensor, length: int, end: int, capacity: int) -> Tensor:
    """[B,capacity,...] with the first `length` columns of `held` in those before `end`."""
    moved = held.new_zeros(held.shape[0], capacity, *held.shape[2:])
    moved[:, end - length : end] = held[:, :length]
    return moved
