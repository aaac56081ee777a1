"""Sequence parallelism: each process holds a range of chunks of every sequence.

Chunked cross-attention needs no key of another process: a chunk's neighbours are read by the M tokens that follow it,
so the first M-1 tokens of a range need one chunk's neighbours from before it. Their token ids and that chunk's
activations cross the border, and both processes encode them. Self-attention gathers keys and values.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from retro_model.base import checks
from retro_model.layers import ChunkedCrossAttention, NextTokenLoss, RelativePositions, linear_cross_entropy
from retro_model.retro.config import RetroConfig
from retro_model.retro.encoder import NeighbourEncoder
from retro_model.training import Batch

from .attention import gathered_attention
from .collectives import Line, StateBefore


class SequencePart:
    """This process's range of every sequence: of N tokens in P processes, rank r holds tokens r*N/P to (r+1)*N/P - 1.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "sequence"))
        part = SequencePart(mesh["sequence"])
        training.shard(model, mesh)  # or DistributedDataParallel: gradients are summed over all processes
        for step in range(steps):
            training.train_step(model, optimizer, [part.split(next(stream))], settings, step)

    `model(tokens, neighbours, part=part)` gives the logits of the range. Sent by each process, a sequence of the batch,
    forward (the backward pass sends as much again):

        keys and values   (P-1) * N/P * 2GD elements a layer
        CCA               M*d elements and K*R token ids (with a mask, as many bytes), once for all CCA layers

    With dropout, processes draw different masks where their generators are seeded differently; seed them by rank.

    Args:
        group: a process group or a mesh of one dimension; its ranks are in the order of the ranges.

    Attributes:
        line: the processes; `line.sent` counts the bytes that this one has sent.
    """

    def __init__(self, group=None) -> None:
        self.line = Line(group)

    def split(self, batch: Batch) -> PartBatch:
        """This process's range of a batch that it has whole, with the neighbours of the range's chunks."""
        rank, size, tokens = self.line.rank, self.line.size, batch.tokens.shape[1]
        chunks = 0 if batch.neighbours is None else batch.neighbours.shape[1]
        if tokens % size or chunks % size:
            raise ValueError(
                f"batch: expected tokens and chunks that {size} processes divide; got {tokens} and {chunks}"
            )

        def mine(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.chunk(size, 1)[rank].contiguous()

        return PartBatch(
            mine(batch.tokens), mine(batch.real), mine(batch.neighbours), mine(batch.neighbour_mask), part=self
        )

    def check(self, config: RetroConfig, tokens: Tensor, cache, token_mask) -> None:
        """ValueError unless the ranges of all processes are whole chunks of sequences that the model takes."""
        if cache is not None or token_mask is not None:
            raise ValueError(
                f"part: expected no {'token_mask' if cache is None else 'cache'} with a part of a sequence; got both"
            )
        checks.shape("tokens", tokens, "B,N", {})
        width, longest = tokens.shape[1], config.max_len // self.line.size
        if width % config.chunk_len or not 0 < width <= longest:
            most = f"at most max_len / {self.line.size} processes = {longest}"
            whole = f"a range of whole chunks of chunk_len={config.chunk_len}"
            raise ValueError(f"tokens: expected {whole}, {most}; got N={width}")

    def retrieval(self, encoder: NeighbourEncoder, neighbours: Tensor, neighbour_mask: Tensor | None) -> PartRetrieval:
        return PartRetrieval(self.line, encoder, neighbours, neighbour_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: RelativePositions, **options) -> Tensor:
        """Causal attention of the range's queries to all tokens up to each, [B,n,H,D]."""
        table = positions(0, (self.line.rank + 1) * query.shape[1])
        return gathered_attention(self.line, query, key, value, table, **options)

    def next_token_loss(self, x: Tensor, weight: Tensor, tokens: Tensor, counted: Tensor) -> NextTokenLoss:
        """`next_token_loss` of the range."""
        return next_token_loss(self.line, x, weight, tokens, counted)


def next_token_loss(line: Line, x: Tensor, weight: Tensor, tokens: Tensor, counted: Tensor) -> NextTokenLoss:
    """Loss of predicting the token after each token of a range; the next process sends its first token.

    losses: [B,n], that of the token after each; 0 after a sequence's last.
    """
    first = torch.stack([tokens[:, :1], counted[:, :1].to(tokens.dtype)])
    target, counts = line.from_after("token after the range", [first])[0]
    counts = torch.zeros_like(counts) if line.rank == line.size - 1 else counts
    targets = torch.cat([tokens[:, 1:], target], 1)
    weights = torch.cat([counted[:, 1:], counts.to(counted.dtype)], 1)
    total, losses = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), weights.flatten())
    return NextTokenLoss(total, losses.view(tokens.shape))


@dataclasses.dataclass(frozen=True)
class PartBatch(Batch):
    """A range of a batch: its first token counts too where another process holds what comes before."""

    part: SequencePart | None = None

    @property
    def inputs(self) -> dict:
        return super().inputs | {"part": self.part}

    @property
    def counted(self) -> Tensor:
        return self.real[:, 1:] if self.part.line.rank == 0 else self.real


class PartRetrieval:
    """Neighbours of a range and of the chunk before it; the counterpart of `retrieval.Retrieval`."""

    retrieves = True

    def __init__(
        self, line: Line, encoder: NeighbourEncoder, neighbours: Tensor, neighbour_mask: Tensor | None
    ) -> None:
        self.line, self.encoder, self.chunk_len = line, encoder, encoder.config.chunk_len
        self.neighbours = self._led(neighbours)
        self.mask = None if neighbour_mask is None else self._led(neighbour_mask)

    def _led(self, own: Tensor) -> Tensor:
        last = own[:, -1:].contiguous()
        before = self.line.from_before(
            "neighbours of the chunk before", [last.view(torch.uint8) if last.dtype == torch.bool else last]
        )[0]
        return own if self.line.rank == 0 else torch.cat([before.view(own.dtype), own], 1)

    def encode(self, x: Tensor) -> Tensor:
        """The neighbours of the chunk before and of the range's own, [B,L,K,R,d']."""
        own, before = StateBefore.apply(self.line, x, self.chunk_len)
        if self.line.rank:
            own = torch.cat([before, own], 1)
        return self.encoder(self.neighbours, own.unflatten(1, (-1, self.chunk_len)), neighbour_mask=self.mask)

    def cross_attend(self, cca: ChunkedCrossAttention, x: Tensor, encoded: Tensor, layer: int) -> Tensor:
        """The update [B,n,d] of the range; the chunk before it counts as its chunk 0."""
        key, value = cca.project(encoded)
        start = self.chunk_len if self.line.rank else 0
        return cca.attend(x, key, value, cca.relative_keys(key.shape[3]), neighbour_mask=self.mask, query_start=start)
