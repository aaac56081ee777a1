"""Sequence parallelism: each process holds a range of chunks of every sequence.

The M tokens from a chunk's last one on attend its neighbours, so the first M-1 tokens of a range attend the neighbours
of the chunk before the range. The process before sends their token ids and that chunk's activations, and both processes
encode them. Self-attention gathers keys and values.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import retro_kernels as rk
from retro_model.base import checks
from retro_model.layers import ChunkedCrossAttention, NextTokenLoss, RelativePositions, linear_cross_entropy
from retro_model.retro.config import RetroConfig
from retro_model.retro.encoder import NeighbourEncoder
from retro_model.training import Batch

from .collectives import GatherAll, Group, Line, StateBefore


def gathered_attention(
    line: Line, query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, segment: Tensor | None = None, **options
) -> Tensor:
    """Return this process's rows of `rk.relative_attention(..., causal=True)` over the whole sequence.

    Args:
        line: the processes, in the order of their ranges of n tokens.
        query, key, value: of this process's range, [B,n,H,D] and [B,n,G,D].
        rel_key: [H,(rank+1)*n,D], row t for displacement t.
        segment: integers [B,n], for packed documents: a token attends its own segment; None: a single document.
        options: content_bias, position_bias, dropout_p, backend.

    Returns: [B,n,H,D].
    """
    seen = (line.rank + 1) * query.shape[1]
    both = GatherAll.apply(line, "keys and values", torch.stack([key, value]))  # [size,2,B,n,G,D]
    key, value = both[: line.rank + 1].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    if segment is not None:
        every = line.gather("segments", segment)[: line.rank + 1].transpose(0, 1).flatten(1)
        options |= {"query_segment": segment, "key_segment": every}
    return rk.relative_attention(
        query, key, value, rel_key=rel_key, rel_start=0, causal=True, query_offset=seen - query.shape[1], **options
    )


class SequencePart:
    """This process's range of every sequence: of N tokens in P processes, rank r holds tokens r*N/P to (r+1)*N/P - 1.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "sequence"))
        part = SequencePart(mesh["sequence"])
        training.shard(model, mesh)  # or DistributedDataParallel: gradients are summed over all processes
        for step in range(steps):
            training.train_step(model, optimizer, [part.split(next(stream))], settings, step)

    `model(tokens, neighbours, part=part)` returns the logits of the range. For each sequence of the batch, a process
    sends in the forward pass (and as much again in the backward pass):

        keys and values   (P-1) * N/P * 2GD elements a layer
        CCA               M*d elements and K*R token ids (with a mask, as many bytes), once for all CCA layers

    With dropout, seed the generators by rank, so that processes draw different masks.

    Args:
        group: a process group or a mesh of one dimension; its ranks are in the order of the ranges.

    Attributes:
        line: the processes; `line.sent` counts the bytes that this one has sent.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.line = Line(group)

    def split(self, batch: Batch) -> PartBatch:
        """Return this process's range of a whole batch, with the neighbours of the range's chunks."""
        rank, size, tokens = self.line.rank, self.line.size, batch.tokens.shape[1]
        chunks = 0 if batch.neighbours is None else batch.neighbours.shape[1]
        if tokens % size or chunks % size:
            got = f"{tokens} and {chunks}"
            raise ValueError(f"batch: expected tokens and chunks that {size} processes divide; got {got}")

        def mine(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.chunk(size, 1)[rank].contiguous()

        parts = map(mine, (batch.tokens, batch.real, batch.neighbours, batch.neighbour_mask))
        return PartBatch(*parts, part=self)

    def check(self, config: RetroConfig, tokens: Tensor, cache, token_mask) -> None:
        """Raise ValueError unless a range is whole chunks and all ranges together are at most max_len tokens."""
        if cache is not None or token_mask is not None:
            raise ValueError(f"part: expected None with a {'token_mask' if cache is None else 'cache'}; got a part")
        checks.shape("tokens", tokens, "B,N", {})
        width, longest = tokens.shape[1], config.max_len // self.line.size
        if width % config.chunk_len or not 0 < width <= longest:
            most = f"at most max_len / {self.line.size} processes = {longest}"
            whole = f"a range of whole chunks of chunk_len={config.chunk_len}"
            raise ValueError(f"tokens: expected {whole}, {most}; got N={width}")

    def retrieval(self, encoder: NeighbourEncoder, neighbours: Tensor, neighbour_mask: Tensor | None) -> PartRetrieval:
        return PartRetrieval(self.line, encoder, neighbours, neighbour_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: RelativePositions, **options) -> Tensor:
        """Return causal attention of the range's queries to all tokens up to each, [B,n,H,D]."""
        table = positions(0, (self.line.rank + 1) * query.shape[1])
        return gathered_attention(self.line, query, key, value, table, **options)

    def next_token_loss(self, x: Tensor, weight: Tensor, tokens: Tensor, counted: Tensor) -> NextTokenLoss:
        """Return the loss [B,n] of predicting the token after each token of the range; 0 after a sequence's last.

        The next process sends its first token.
        """
        first = torch.stack([tokens[:, :1], counted[:, :1].to(tokens.dtype)])
        target, counts = self.line.from_after("token after the range", first)
        counts = torch.zeros_like(counts) if self.line.rank == self.line.size - 1 else counts
        targets = torch.cat([tokens[:, 1:], target], 1)
        weights = torch.cat([counted[:, 1:], counts.to(counted.dtype)], 1)
        total, losses = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), weights.flatten())
        return NextTokenLoss(total, losses.view(tokens.shape))


@dataclasses.dataclass(frozen=True)
class PartBatch(Batch):
    """Range of a batch. Its first token counts too, unless the range is a sequence's beginning."""

    part: SequencePart | None = None

    @property
    def inputs(self) -> dict:
        return super().inputs | {"part": self.part}

    @property
    def counted(self) -> Tensor:
        return self.real[:, 1:] if self.part.line.rank == 0 else self.real


class PartRetrieval:
    """`retrieval.Retrieval` of a range: the neighbours of its chunks and of the chunk before it."""

    retrieves = True

    def __init__(self, line: Line, encoder: NeighbourEncoder, neighbours: Tensor, neighbour_mask: Tensor | None):
        self.line, self.encoder, self.chunk_len = line, encoder, encoder.config.chunk_len
        self.neighbours = self._led(neighbours)
        self.mask = None if neighbour_mask is None else self._led(neighbour_mask)

    def _led(self, own: Tensor) -> Tensor:
        last = own[:, -1:].contiguous()
        sent = last.view(torch.uint8) if last.dtype == torch.bool else last
        before = self.line.from_before("neighbours of the chunk before", sent)
        return own if self.line.rank == 0 else torch.cat([before.view(own.dtype), own], 1)

    def encode(self, x: Tensor) -> Tensor:
        """Encode the neighbours of the chunk before the range and of the range's chunks, [B,L,K,R,d']."""
        own, before = StateBefore.apply(self.line, x, self.chunk_len)
        if self.line.rank:
            own = torch.cat([before, own], 1)
        return self.encoder(self.neighbours, own.unflatten(1, (-1, self.chunk_len)), neighbour_mask=self.mask)

    def cross_attend(self, cca: ChunkedCrossAttention, x: Tensor, encoded: Tensor, layer: int) -> Tensor:
        """Return the update [B,n,d] of the range. The chunk before the range is chunk 0 of the op's call."""
        key, value = cca.project(encoded)
        start = self.chunk_len if self.line.rank else 0
        return cca.attend(x, key, value, cca.relative_keys(key.shape[3]), neighbour_mask=self.mask, query_start=start)
