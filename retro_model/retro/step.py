"""One token of every row, as a function of tensors that stay where they are: what a CUDA graph can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.base import transfer
from retro_model.layers import ChunkedCrossAttention

from .cache import RetroCache


class RetroStep:
    """A Retro's step of one token a row, which asks the host nothing: positions are the device's, capacity is fixed.

    A step goes one of three ways: before any neighbours were given ("alone"), within chunks ("reads"), and where some
    row completes a chunk ("encodes"). Then the encoder runs for all rows, and the rows that complete a chunk keep its
    output. Retrieval itself stays outside: its neighbours are copied into the step's own memory.

    Args:
        model: a `Retro` in evaluation mode.
        cache: holds the prompts, and takes in the tokens.
    """

    def __init__(self, model, cache: RetroCache):
        self.model, self.cache = model, cache
        device = model.embedding.weight.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        self.column = torch.empty(cache.batch, dtype=torch.int64, device=device)  # of the token, the same for all rows
        self.starts = transfer.numbers(cache.starts, device)
        self.row = torch.arange(cache.batch, device=device)
        self.neighbours: Tensor | None = None  # [B,K,R] of the chunks that complete, and their mask
        self.neighbour_mask: Tensor | None = None
        self.known = -1  # the column that the device knows

    def begin(self, neighbours: Tensor | None = None, neighbour_mask: Tensor | None = None) -> str | None:
        """Copy in the neighbours [B,1,K,R] of chunks that complete; return the name of the step's way.

        None: the model itself must make this step, the first one with neighbours."""
        cache = self.cache
        if cache.length >= cache.capacity:
            raise ValueError(f"cache: expected room for a token; got {cache.length} of {cache.capacity} columns filled")
        if self.known != cache.length:
            self.column.fill_(cache.length)
            self.known = cache.length
        if cache.neighbour_mask is None:
            return "alone" if neighbours is None and cache.layers[0].keys is not None and self._kept() else None
        if not cache.completes(1):
            return "reads"
        if self.neighbours is None:
            self.neighbours = torch.zeros_like(cache.neighbour_mask, dtype=torch.int64)
            self.neighbour_mask = torch.zeros_like(cache.neighbour_mask)
        if neighbours is None:
            self.neighbour_mask.zero_()
        else:
            self.neighbours.copy_(neighbours[:, 0])
            mask = neighbour_mask
            mask = torch.ones_like(neighbours[:, 0], dtype=torch.bool) if mask is None else mask[:, 0]
            self.neighbour_mask.copy_(mask if mask.dim() == 3 else mask.unsqueeze(-1))
        return "encodes"

    def run(self, way: str) -> Tensor:
        """Logits [B,V] after `tokens` [B,1]; on the device alone."""
        model, cache = self.model, self.cache
        retrieval = None if model.encoder is None else StepRetrieval(self, way)
        key_mask = cache.key_mask(1, self.tokens.device)
        x, encoded = model.embedding(self.tokens), None
        for layer in model.layers:
            held = cache.layers[layer.index - 1].at(self.column)
            x, encoded = layer(x, retrieval, encoded, key_mask=key_mask, cache=held)
        self.column += 1
        return model.readout(model.norm(x)[:, -1])

    def finish(self) -> None:
        """Advance the host's counters by the token that the device took in."""
        self.cache.length += 1
        for layer in self.cache.layers:
            layer.length += 1
        self.known += 1

    def _kept(self) -> bool:
        return self.model.encoder is None or self.cache.chunk is not None


class StepRetrieval:
    """`Retrieval` within one decode step: the device holds each row's position."""

    def __init__(self, step: RetroStep, way: str):
        self.step, self.cache, self.encodes = step, step.cache, way == "encodes"
        self.retrieves = way != "alone"
        m = step.model.config.chunk_len
        position = step.column - step.starts
        self.phase = position % m
        self.done = self.phase == m - 1
        #: the held neighbours count as chunk 0's, which positions from M-1 on attend
        self.query_start = (position + 1) % m + m - 1

    def encode(self, x: Tensor) -> list[Tensor]:
        """The encoded neighbours [B,1,K,R,d'] of the chunks that x [B,1,d] completes, if any."""
        step, cache = self.step, self.cache
        cache.chunk[step.row, self.phase] = x[:, 0].to(cache.chunk.dtype)
        if not self.encodes:
            return []
        mask = step.neighbour_mask
        cache.neighbour_mask.copy_(torch.where(self.done[:, None, None], mask, cache.neighbour_mask))
        encoder = step.model.encoder
        # the same launches whatever the tokens are
        return [encoder(step.neighbours[:, None], cache.chunk[:, None], neighbour_mask=mask[:, None], share=False)]

    def cross_attend(self, cca: ChunkedCrossAttention, x: Tensor, encoded: list[Tensor], layer: int) -> Tensor:
        """The update [B,1,d] that layer `layer`'s chunked cross-attention makes of x [B,1,d]."""
        kept = self.cache.neighbours[layer]
        for states in encoded:
            for held, new in zip((kept.keys, kept.values), cca.project(states)):
                held.copy_(torch.where(self.done.view(-1, 1, 1, 1, 1), new[:, 0].to(held.dtype), held))
        key, value, mask = (t.unsqueeze(1) for t in (kept.keys, kept.values, self.cache.neighbour_mask))
        return cca.attend(x, key, value, kept.rel_key, neighbour_mask=mask, query_start=self.query_start)
