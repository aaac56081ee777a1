"""Decode step of one token a row, over tensors at fixed addresses, for capture in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.base import checks, transfer
from retro_model.layers import ChunkedCrossAttention, StepKeys

from .cache import RetroCache


class RetroStep:
    """Decode step of a Retro, without synchronisation: positions are tensors on the device, the capacity is fixed.

    There are three ways: "alone" before any neighbours were passed, "reads" within chunks, and "encodes" if a row
    completes a chunk. "encodes" runs the encoder for all rows; the rows that complete a chunk keep its output. The
    caller retrieves; `begin` copies the neighbours into the step's own memory.

    Args:
        model: a `Retro` in evaluation mode.
        cache: holds the prompts; the tokens are appended.
    """

    def __init__(self, model, cache: RetroCache):
        self.model, self.cache = model, cache
        device = model.embedding.weight.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        self.column = torch.empty(cache.batch, dtype=torch.int64, device=device)  # column of the token in all rows
        self.starts = transfer.numbers(cache.starts, device)
        self.row = torch.arange(cache.batch, device=device)
        self.neighbours: Tensor | None = None  # [B,K,R] of the chunks that complete
        self.neighbour_mask: Tensor | None = None
        self.known = -1  # value of `column`, on the host

    def begin(self, neighbours: Tensor | None = None, neighbour_mask: Tensor | None = None) -> str | None:
        """Copy the neighbours [B,1,K,R] of chunks that complete. Return the name of the step's way.

        None: the caller must run the model instead, for the first neighbours.
        """
        cache = self.cache
        if cache.length >= cache.capacity:
            raise ValueError(f"cache: expected room for a token; got {cache.length} of {cache.capacity} columns filled")
        if self.known != cache.length:
            self.column.fill_(cache.length)
            self.known = cache.length
        if cache.neighbour_mask is None:
            begun = cache.layers[0].keys is not None and (self.model.encoder is None or cache.chunk is not None)
            return "alone" if neighbours is None and begun else None
        if not cache.completes(1):
            return "reads"
        if self.neighbours is None:
            self.neighbours = torch.zeros_like(cache.neighbour_mask, dtype=torch.int64)
            self.neighbour_mask = torch.zeros_like(cache.neighbour_mask)
        if neighbours is None:
            self.neighbour_mask.zero_()
        else:
            self.neighbours.copy_(neighbours[:, 0])
            self.neighbour_mask.copy_(checks.token_mask(neighbour_mask, neighbours)[:, 0])
        return "encodes"

    def run(self, way: str) -> Tensor:
        """Return logits [B,V] after `tokens` [B,1], without synchronisation."""
        model, cache = self.model, self.cache
        retrieval = None if model.encoder is None else StepRetrieval(self, way)
        key_mask = cache.key_mask(1, self.tokens.device)
        x, encoded = model.embedding(self.tokens), None
        for layer in model.layers:
            held = StepKeys(cache.layers[layer.index - 1], self.column)
            x, encoded = layer(x, retrieval, encoded, key_mask=key_mask, cache=held)
        self.column += 1
        return model.readout(model.norm(x)[:, -1])

    def finish(self) -> None:
        """Advance the host's counters by one token."""
        self.cache.length += 1
        for layer in self.cache.layers:
            layer.length += 1
        self.known += 1


class StepRetrieval:
    """`Retrieval` of one decode step, with each row's position on the device."""

    def __init__(self, step: RetroStep, way: str):
        self.step, self.cache, self.encodes = step, step.cache, way == "encodes"
        self.retrieves = way != "alone"
        m = step.model.config.chunk_len
        position = step.column - step.starts
        self.phase = position % m
        self.done = self.phase == m - 1
        #: the cached neighbours are chunk 0's, which positions from M-1 on attend
        self.query_start = (position + 1) % m + m - 1

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the encoded neighbours [B,1,K,R,d'] if a row of x [B,1,d] completes a chunk."""
        step, cache = self.step, self.cache
        cache.chunk[step.row, self.phase] = x[:, 0].to(cache.chunk.dtype)
        if not self.encodes:
            return []
        mask = step.neighbour_mask
        cache.neighbour_mask.copy_(torch.where(self.done[:, None, None], mask, cache.neighbour_mask))
        encoder = step.model.encoder
        return [encoder(step.neighbours[:, None], cache.chunk[:, None], neighbour_mask=mask[:, None])]

    def cross_attend(self, cca: ChunkedCrossAttention, x: Tensor, encoded: list[Tensor], layer: int) -> Tensor:
        """Return the update [B,1,d] of x [B,1,d] by layer `layer`'s chunked cross-attention."""
        kept = self.cache.neighbours[layer]
        for states in encoded:
            for held, new in zip((kept.keys, kept.values), cca.project(states)):
                held.copy_(torch.where(self.done.view(-1, 1, 1, 1, 1), new[:, 0].to(held.dtype), held))
        key, value, mask = (t.unsqueeze(1) for t in (kept.keys, kept.values, self.cache.neighbour_mask))
        return cca.attend(x, key, value, kept.rel_key, neighbour_mask=mask, query_start=self.query_start)
