"""Documents of an RPT split over processes: each holds a range of segments and retrieves from all ranges up to its own.

The processes exchange a window's keys and values, the states and keys of every chunk, the gate's keys and values, and
the neighbours of the chunk before a range. The paper trains documents of 16,384 tokens on four devices (arXiv
2306.13421, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from retro_model.layers.rotary import rotation
from retro_model.rpt.layers import Memory, Retrieved
from retro_model.rpt.supervision import Supervision

from .collectives import GatherAll, StateBefore
from .sequence import Range


class DocumentPart(Range):
    """This process's range of every document: of N tokens in P processes, rank r holds tokens r*N/P to (r+1)*N/P - 1.

        part = DocumentPart()
        tokens, lessons = part.split(tokens, lessons)      # of whole documents, [B,N] and [B,L,C]
        model(tokens, part=part)                           # logits of the range, or:
        # with the model in DDP or FSDP2, which sum the gradients
        train_step(model, optimizer, tokens, lessons, settings, taught, step, part=part)

    Logits, losses and gradients are the same as in one process with whole documents. For each document of the batch, a
    process sends in the forward pass (and as much again in the backward pass), with n = N/P and l = n/m:

        window   2S * d elements a layer, to the next process alone
        chunks   (P-1) * (n + l) * d elements: states and keys of all chunks
        gate     (P-1) * 2 l K d elements
        CCA      K * 2m * d elements, the neighbours of the range's last chunk, to the next process

    Args:
        group: a process group or a mesh of one dimension; its ranks are in the order of the ranges.

    Attributes:
        line: the processes; `line.sent` counts the bytes that this one has sent.
    """

    def split(self, tokens: Tensor, supervision: Supervision | None = None) -> tuple[Tensor, Supervision | None]:
        """Return this process's range of whole documents. Candidates keep their numbers in the whole document."""

        def mine(t: Tensor) -> Tensor:
            if t.shape[1] % self.line.size:
                want = f"tokens and chunks that {self.line.size} processes divide"
                raise ValueError(f"tokens: expected {want}; got {t.shape[1]}")
            return t.chunk(self.line.size, 1)[self.line.rank].contiguous()

        return mine(tokens), None if supervision is None else Supervision(*(mine(t) for t in supervision))

    def check(self, config, tokens: Tensor, cache) -> None:
        """Raise ValueError unless a range is whole segments and chunks, at least as long as the window's reach."""
        if cache is not None:
            raise ValueError("part: expected None with a cache; got a part")
        unit = config.segment if config.segment % config.chunk_len == 0 else config.segment * config.chunk_len
        least = config.segment * (2 if config.window == "sliding" else 1)
        width = tokens.shape[1]
        if width % unit or width < least:
            want = f"a range of whole segments and chunks, a multiple of {unit} from {least} on"
            raise ValueError(f"tokens: expected {want}; got N={width}")

    def first(self, width: int) -> int:
        """Return the number of the range's first token or chunk; `width`: their number in a range."""
        return self.line.rank * width

    def window(self, attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the update of a window attention whose first tokens attend keys of the process before."""
        reach = attention.segment * (2 if attention.sliding else 1)
        both, before = StateBefore.apply(self.line, torch.cat([key, value], -1), reach)
        if self.line.rank:
            both = torch.cat([before, both], 1)
        return attention.window(query, *both.chunk(2, -1))

    def remember(
        self, model, hidden: Tensor, index: Tensor | None, k: int, trunk_share: float = 1.0
    ) -> tuple[Memory, Retrieved]:
        """`SelfMemory.remember` for the chunks of the range. The memory begins with the chunk before the range."""
        chunks = hidden.unflatten(1, (-1, model.config.chunk_len))
        first, states, scores = self.first(chunks.shape[1]), chunks, None
        if model.retriever is not None:
            states = model.retriever.encode(hidden)
            query, key = model.retriever.project(states, trunk_share)
            key = self._gathered("keys of chunks", key)
            scores = model.retriever.scores(query, key, first)
            index = model.retriever.select(query, key, k, index, first)
        every = self._gathered("states of chunks", states)
        neighbours = model.neighbours.of(every, chunks, index)
        gate = model.gate(neighbours, index >= 0, first * index.shape[2], self._extended)
        retrieved = Retrieved(scores, index, gate)
        if self.line.size > 1:
            neighbours, states_before = StateBefore.apply(self.line, neighbours, 1)
            gate, gate_before = StateBefore.apply(self.line, gate, 1)
            index_before = self.line.from_before("neighbours of the chunk before", index[:, -1:])
        if self.line.rank:
            led = (states_before, neighbours), (gate_before, gate), (index_before, index)
            neighbours, gate, index = (torch.cat(pair, 1) for pair in led)
        turn = rotation(torch.arange(neighbours.shape[-2], device=hidden.device), model.config.head_dim, hidden.dtype)
        return Memory(neighbours, turn, index, gate, model.config.chunk_len if self.line.rank else 0), retrieved

    def _gathered(self, what: str, x: Tensor) -> Tensor:
        """Concatenate every process's x [B,l,...]: [B,P*l,...]."""
        return GatherAll.apply(self.line, what, x.contiguous()).transpose(0, 1).flatten(1, 2)

    def _extended(self, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the gate's keys, values and masks of all ranges up to this one."""
        seen = (self.line.rank + 1) * key.shape[1]
        both = self._gathered("keys and values of the gate", torch.cat([key, value], -1))[:, :seen]
        masks = self.line.gather("which neighbours there are", mask.to(torch.uint8)).transpose(0, 1).flatten(1)
        return *both.chunk(2, -1), masks[:, :seen].bool()
