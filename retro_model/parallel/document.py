"""Documents of an RPT split over processes: each holds a range of segments, and retrieves from all that lies before.

The processes exchange a window's keys and values, the states and keys of every chunk, the gate's keys and values, and
the neighbours of the chunk before a range. The paper trains documents of 16,384 tokens on four devices (arXiv
2306.13421, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.layers import NextTokenLoss
from retro_model.layers.rotary import rotation
from retro_model.rpt.layers import Memory, Retrieved
from retro_model.rpt.supervision import Supervision

from .collectives import GatherAll, Line, StateBefore
from .sequence import next_token_loss


class DocumentPart:
    """This process's range of every document: of N tokens in P processes, rank r holds tokens r*N/P to (r+1)*N/P - 1.

        part = DocumentPart()
        tokens, lessons = part.split(tokens, lessons)      # of whole documents, [B,N] and [B,L,C]
        model(tokens, part=part)                           # logits of the range, or:
        # with the model in DDP or FSDP2, which sum the gradients
        train_step(model, optimizer, tokens, lessons, settings, taught, step, part=part)

    Logits, losses and gradients are those of one process that holds it all. Sent by each process, a document of the
    batch, forward (the backward pass sends as much again), with n = N/P and l = n/m:

        window   2S * d elements a layer, to the next process alone
        chunks   (P-1) * (n + l) * d elements: states and keys of all chunks
        gate     (P-1) * 2 l K d elements
        CCA      K * 2m * d elements, the neighbours of the range's last chunk, to the next process

    Args:
        group: a process group or a mesh of one dimension; its ranks are in the order of the ranges.

    Attributes:
        line: the processes; `line.sent` counts the bytes that this one has sent.
    """

    def __init__(self, group=None) -> None:
        self.line = Line(group)

    def split(self, tokens: Tensor, supervision: Supervision | None = None) -> tuple[Tensor, Supervision | None]:
        """This process's range of documents that it has whole; candidates keep the numbers of whole documents."""

        def mine(t: Tensor) -> Tensor:
            if t.shape[1] % self.line.size:
                raise ValueError(
                    f"tokens: expected tokens and chunks that {self.line.size} processes divide; got {t.shape[1]}"
                )
            return t.chunk(self.line.size, 1)[self.line.rank].contiguous()

        return mine(tokens), None if supervision is None else Supervision(*(mine(t) for t in supervision))

    def check(self, config, tokens: Tensor, cache) -> None:
        """ValueError unless a range is whole segments and chunks, and as long as the window."""
        if cache is not None:
            raise ValueError("part: expected no cache with a part of a document; got both")
        unit = config.segment if config.segment % config.chunk_len == 0 else config.segment * config.chunk_len
        least = config.segment * (2 if config.window == "sliding" else 1)
        width = tokens.shape[1]
        if width % unit or width < least:
            raise ValueError(
                f"tokens: expected a range of whole segments and chunks, a multiple of {unit} from {least} on; got "
                f"N={width}"
            )

    def first(self, width: int) -> int:
        """The number of this range's first token, or chunk, where ranges have `width` of them."""
        return self.line.rank * width

    def window(self, attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The update of a window attention whose first tokens see keys of the process before."""
        reach = attention.segment * (2 if attention.sliding else 1)
        both, before = StateBefore.apply(self.line, torch.cat([key, value], -1), reach)
        if self.line.rank:
            both = torch.cat([before, both], 1)
        return attention.window(query, *both.chunk(2, -1))

    def remember(
        self, model, hidden: Tensor, index: Tensor | None, k: int, trunk_share: float = 1.0
    ) -> tuple[Memory, Retrieved]:
        """`SelfMemory.remember` for the chunks of the range; the memory is led by the neighbours of the chunk before
        it."""
        chunks = hidden.unflatten(1, (-1, model.config.chunk_len))
        first, states, scores = self.first(chunks.shape[1]), chunks, None
        if model.retriever is not None:
            states = model.retriever.encode(hidden)
            query, key = model.retriever.project(states, trunk_share)
            key = self._gathered("keys of chunks", key)
            scores = model.retriever.scores(query, key, first)
            index = model.retriever.choose(query, key, k, index, first)
        every = self._gathered("states of chunks", states)
        neighbours = model.neighbours.of(every, chunks, index)
        gate = self._gate(model.gate, neighbours, index >= 0)
        retrieved = Retrieved(scores, index, gate)
        if self.line.rank or self.line.size > 1:
            neighbours, gate, index = self._led(neighbours, gate, index)
        turn = rotation(torch.arange(neighbours.shape[-2], device=hidden.device), model.config.head_dim, hidden.dtype)
        return Memory(neighbours, turn, index, gate, model.config.chunk_len if self.line.rank else 0), retrieved

    def _gathered(self, what: str, x: Tensor) -> Tensor:
        """[B,P*l,...] of every process's [B,l,...]."""
        return GatherAll.apply(self.line, what, x.contiguous()).transpose(0, 1).flatten(1, 2)

    def _gate(self, gate, states: Tensor, neighbour_mask: Tensor) -> Tensor:
        pooled = states.mean(-2).flatten(1, 2)
        count, seen = pooled.shape[1], (self.line.rank + 1) * pooled.shape[1]
        positions = torch.arange(seen - count, seen, device=pooled.device)
        turn, normed = rotation(positions, gate.attention.head_dim, pooled.dtype), gate.norm(pooled)
        both = self._gathered("keys and values of the gate", torch.cat(gate.attention.project(normed, turn), -1))
        both = both[:, :seen]
        there = self.line.gather("which neighbours there are", neighbour_mask.flatten(1).to(torch.uint8))
        there = there.transpose(0, 1).flatten(1)[:, :seen]
        update = gate.attention.attend(
            gate.attention.queries(normed, turn),
            *both.chunk(2, -1),
            causal=True,
            query_offset=seen - count,
            key_mask=there.bool(),
        )
        return gate.value(pooled, update).view(neighbour_mask.shape)

    def _led(self, neighbours: Tensor, gate: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        neighbours, states_before = StateBefore.apply(self.line, neighbours, 1)
        gate, gate_before = StateBefore.apply(self.line, gate, 1)
        index_before = self.line.from_before("neighbours of the chunk before", [index[:, -1:]])[0]
        if not self.line.rank:
            return neighbours, gate, index
        return tuple(
            torch.cat(pair, 1) for pair in ((states_before, neighbours), (gate_before, gate), (index_before, index))
        )

    def next_token_loss(self, x: Tensor, weight: Tensor, tokens: Tensor, counted: Tensor) -> NextTokenLoss:
        """Loss [B,n] of predicting the token after each token of the range; 0 after a document's last."""
        return next_token_loss(self.line, x, weight, tokens, counted)
