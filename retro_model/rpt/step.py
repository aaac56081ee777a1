"""Decode step of one token a row, over tensors at fixed addresses, for capture in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import RPTCache
from .decoding import Call


class RPTStep(Call):
    """Decode step of an RPT within chunks, without synchronisation: positions are tensors on the device.

    A step that completes a row's chunk encodes it, searches with it and adds it to a growing index. The model itself
    makes such a step, with the same cache.

    Args:
        model: an `RPT` in evaluation mode.
        cache: holds the prompts; the tokens are appended.
    """

    def __init__(self, model, cache: RPTCache):
        if cache.retrieval is None:
            raise ValueError("cache: expected one that holds tokens; got an empty one")
        super().__init__(model, cache, slice(None), cache.positions, list(range(cache.batch)), 1)
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=self.position.device)
        self.known = list(cache.positions)  # value of `position`, on the host

    def begin(self, retrieval: bool = True) -> str | None:
        """Return the name of the step's way. None: a row completes its chunk; run the model instead."""
        cache = self.cache
        if cache.capacity is not None and max(cache.positions) >= cache.capacity:
            raise ValueError(f"cache: expected room for a token; got {cache.capacity} positions filled")
        if cache.retrieval and cache.completes(1):
            return None
        if self.known != cache.positions:  # after a step by the model
            self.position += cache.positions[0] - self.known[0]
            self.known = list(cache.positions)
        return "reads" if cache.retrieval else "alone"

    def run(self, way: str) -> Tensor:
        """Return logits [B,V] after `tokens` [B,1], without synchronisation."""
        x = super().run(self.tokens, None)
        self.position += 1
        return self.model.readout(x[:, -1])

    def finish(self) -> None:
        """Advance the host's counters by one token."""
        self.cache.positions = [p + 1 for p in self.cache.positions]
        self.known = list(self.cache.positions)

    def complete(self, hidden: Tensor, index: Tensor | None) -> None:
        """Store the states of the incomplete chunk."""
        m = self.config.chunk_len
        chunk = self.cache.row("chunk", hidden, m, hidden.shape[-1])
        self._put(chunk, (self.row, self.position[:, 0] % m), hidden[:, 0])

    def _used(self) -> int:
        return self.cache.ring
