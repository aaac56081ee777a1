"""Memory of an RPT: from the lower decoder's states to the upper decoder's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retro_model.layers import initialise, rotation

from .config import RPTConfig
from .layers import Memory, Retrieved
from .neighbours import NeighbourEncoder, NeighbourGate
from .retriever import SelfRetriever, in_chunks


class SelfMemory(nn.Module):
    """Base of models with `retriever`, `neighbours` and `gate`; each is None if the configuration has none."""

    def add_memory(self, config: RPTConfig, **options) -> None:
        """Make the parts. A model's constructor calls it, and sets `config`. options: backend, device and dtype."""
        self.retriever = self.neighbours = self.gate = None
        sizes, options = (config.d_model, config.num_heads), {"dropout": config.dropout, **options}
        if config.uses_neighbours:
            self.neighbours = NeighbourEncoder(*sizes, null_slot=config.null_slot, **options)
            self.gate = NeighbourGate(*sizes, floor=config.gate_floor, **options)
        if config.uses_neighbours and config.retriever:
            same = ("chunk_len", "excluded_chunks", "score_scale", "query_norm", "key_norm", "null_slot")
            self.retriever = SelfRetriever(*sizes, **{name: getattr(config, name) for name in same}, **options)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Set initial weights of the parts, null slots included; W_K equal to W_Q."""
        for part, passed in ((self.retriever, 1), (self.neighbours, 2), (self.gate, 1)):
            if part is not None:
                initialise(part, passed)
        if self.gate is not None:
            self.gate.reset_parameters()
        if self.retriever is not None:
            self.retriever.key.weight.copy_(self.retriever.query.weight)

    def remember(self, hidden: Tensor, index: Tensor | None, k: int, trunk_share=1.0) -> tuple[Memory, Retrieved]:
        """Retrieve, encode and gate the neighbours of every complete chunk of the lower decoder's states [B,N,d]."""
        chunks = in_chunks(hidden, self.config.chunk_len)
        states, scores = chunks, None
        if self.retriever is not None:
            states = self.retriever.encode(hidden)
            query, key = self.retriever.project(states, trunk_share)
            scores = self.retriever.scores(query, key)
            index = self.retriever.choose(query, key, k, index)
        if not chunks.shape[1]:  # only the null slot is read
            index = index[:, :0]
        neighbours = self.neighbours(states, chunks, index)
        gate = self.gate(neighbours, index >= 0)
        turn = rotation(torch.arange(neighbours.shape[-2], device=hidden.device), self.config.head_dim, hidden.dtype)
        return Memory(neighbours, turn, index, gate), Retrieved(scores, index, gate)

    def reader_positions(self, position: Tensor) -> Tensor:
        """Return the positions of queries to neighbours, of tokens at `position` of a sequence."""
        return (position + 1) % self.config.chunk_len + self.config.chunk_len - 1
