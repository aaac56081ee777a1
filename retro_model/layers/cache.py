"""Key/value cache of a causal attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class KeyValueCache:
    """Keys and values [B,capacity,G,D] of the tokens so far, and relative keys [H,capacity,D], projected once.

    The first call allocates them in the type of its keys. Rows of different lengths end in the same column: positions
    are relative, so displacements stay right. The caller masks the columns before a row's first token.

    Args:
        capacity: columns.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.rel_keys: Tensor | None = None  # row t for displacement t

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append keys and values [B,N,G,D]; return keys and values to attend [B,S,G,D] and the first new position.

        For a single token S is the capacity, so that every step has the same shapes; a causal attention sees no key
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
        """Return relative keys [H,count,D] of displacements from 0; the first call computes them by `positions`."""
        if self.rel_keys is None:
            self.rel_keys = positions(0, self.capacity)
        return self.rel_keys[:, :count]
