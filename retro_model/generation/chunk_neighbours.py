"""Neighbours of the chunks that complete, checked and in the model's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retro_model.base import checks

#: chunks int64 [n,M] -> neighbours int64 [n,K,R] and their mask: bool [n,K] or [n,K,R], or None to attend all
Retrieve = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class ChunkNeighbours:
    """Source of neighbours: calls `retrieve`, checks its result and moves it to the model's device."""

    def __init__(self, retrieve: Retrieve, config, device: torch.device):
        self.retrieve, self.device = retrieve, device
        self.chunk_len, self.vocab_size = config.chunk_len, config.vocab_size
        self.shape: torch.Size | None = None  # [K,R] of the first result

    def of_prompts(self, rows: list[Tensor]) -> dict:
        """Return the neighbours [B,L,K,R] of all rows' complete chunks; L is the longest row's, padding is masked."""
        m = self.chunk_len
        places = [(row, chunk) for row, tokens in enumerate(rows) for chunk in range(len(tokens) // m)]
        if not places:
            return {}
        chunks = torch.stack([rows[row][chunk * m : (chunk + 1) * m] for row, chunk in places])
        return self.of_places(places, chunks, len(rows))

    def of_places(self, places: list[tuple[int, int]], chunks: Tensor, batch: int) -> dict:
        """Return neighbours [batch,L,K,R] of `chunks` [n,M] at their places (row, chunk); all others are masked."""
        retrieved, (rows, columns) = self._find(chunks), map(list, zip(*places))
        padded = [t.new_zeros(batch, max(columns) + 1, *t.shape[1:]) for t in retrieved]
        for target, t in zip(padded, retrieved):
            target[rows, columns] = t
        return dict(zip(checks.RETRIEVED, padded))

    def _find(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Return neighbours and mask [n,K,R] of chunks [n,M]."""
        found = check_retrieved(self.retrieve(chunks), len(chunks), self.vocab_size, self.shape)
        self.shape = found[0].shape[1:]
        return found[0].to(self.device), found[1].to(self.device)


def check_retrieved(
    retrieved, count: int, vocab_size: int, shape: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Check the result of `retrieve` for `count` chunks. Return neighbours and mask [n,K,R].

    shape: [K,R] of an earlier result, which this one must have too.
    Raises: TypeError, ValueError, naming `retrieve`.
    """
    if not isinstance(retrieved, tuple) or len(retrieved) != 2:
        raise TypeError(f"retrieve: expected it to return (neighbours, mask); got {type(retrieved).__name__}")
    neighbours, mask = retrieved
    sizes = {"n": count}
    if shape is not None:
        sizes["K"], sizes["R"] = shape
    checks.shape("retrieve's neighbours", neighbours, "n,K,R", sizes)
    if neighbours.dtype != torch.int64:
        raise TypeError(f"retrieve's neighbours: expected torch.int64 token ids; got {neighbours.dtype}")
    checks.token_range("retrieve's neighbours", neighbours, vocab_size)
    if mask is not None:
        checks.neighbour_mask(mask, neighbours, "retrieve's mask", "n,K,R")
    return neighbours, checks.token_mask(mask, neighbours)
