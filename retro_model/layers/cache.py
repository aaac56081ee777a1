"""What a causal attention keeps while a model decodes."""

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

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in keys and values [B,N,G,D]; gives all so far [B,length,G,D]."""
        if self.keys is None:
            shape = (key.shape[0], self.capacity, *key.shape[2:])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        end = self.length + key.shape[1]
        self.keys[:, self.length : end] = key
        self.values[:, self.length : end] = value
        self.length = end
        return self.keys[:, :end], self.values[:, :end]

    def relative_keys(self, positions: Callable[[int, int], Tensor]) -> Tensor:
        """[H,length,D], from `positions(first, count)` the first time."""
        if self.rel_keys is None:
            self.rel_keys = positions(0, self.capacity)
        return self.rel_keys[:, : self.length]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [t for t in (self.keys, self.values, self.rel_keys) if t is not None]

    @classmethod
    def join(cls, caches: Sequence[KeyValueCache], capacity: int) -> KeyValueCache:
        """One cache of all rows, in order, moved so that all end in the same column."""
        joined = cls(capacity)
        joined.length = max(c.length for c in caches)
        if all(c.keys is not None for c in caches):
            joined.keys = torch.cat([_moved(c.keys, c.length, joined.length, capacity) for c in caches])
            joined.values = torch.cat([_moved(c.values, c.length, joined.length, capacity) for c in caches])
        return joined


def _moved(held: Tensor, length: int, end: int, capacity: int) -> Tensor:
    """[B,capacity,...] with the first `length` columns of `held` in those before `end`."""
    moved = held.new_zeros(held.shape[0], capacity, *held.shape[2:])
    moved[:, end - length : end] = held[:, :length]
    return moved
