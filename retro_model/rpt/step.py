"""One token of every row, as a function of tensors that stay where they are: what a CUDA graph can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import RPTCache
from .decoding import Call


class RPTStep(Call):
    """An RPT's step of one token a row within chunks, which asks the host nothing: positions are the device's.

    One step in chunk_len completes a row's chunk: then the chunk is encoded, searched with and added to a growing
    index. The model itself makes such a step, with the same cache.

    Args:
        model: an `RPT` in evaluation mode.
        cache: holds the prompts, and takes in the tokens.
    """

    def __init__(self, model, cache: RPTCache):
        if cache.retrieval is None:
            raise ValueError("cache: expected one that holds tokens; got an empty one")
        super().__init__(model, cache, slice(None), cache.positions, list(range(cache.batch)), 1)
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=self.position.device)
        self.known = list(cache.positions)  # the positions that the device knows

    def begin(self, retrieval: bool = True) -> str | None:
        """Return the name of the step's way; None: the model must make this step, as a row completes its chunk."""
        cache = self.cache
        if cache.capacity is not None and max(cache.positions) >= cache.capacity:
            raise ValueError(f"cache: expected room for a token; got {cache.capacity} positions filled")
        if cache.retrieval and cache.completes(1):
            return None
        if self.known != cache.positions:  # after a step of the model's: every row is one further
            self.position += cache.positions[0] - self.known[0]
            self.known = list(cache.positions)
        return "reads" if cache.retrieval else "alone"

    def run(self, way: str) -> Tensor:
        """Logits [B,V] after `tokens` [B,1]; on the device alone."""
        x = super().run(self.tokens, None)
        self.position += 1
        return self.model.readout(x[:, -1])

    def finish(self) -> None:
        """Advance the host's counters by the token that the device took in."""
        self.cache.positions = [p + 1 for p in self.cache.positions]
        self.known = list(self.cache.positions)

    def complete(self, hidden: Tensor, index: Tensor | None) -> None:
        """Keep the states of the incomplete chunk."""
        m = self.config.chunk_len
        chunk = self._row("chunk", hidden, m, hidden.shape[-1])
        self._put(chunk, (self.row, self.position[:, 0] % m), hidden[:, 0])

    def _used(self) -> int:
        return self.cache.ring
