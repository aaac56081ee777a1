"""Reader of Memory Mosaics: the earlier places that each contextual memory recalls, and the tokens after them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from retro_model.memory_mosaics.inspection import inspect

from .reader import Options, Reader
from .reading import Reading, bits

SHORT = 16  # tokens that the model remembers without retrieval
SHOWN = 3  # votes and places shown of a memory, the heaviest
LEAST = 0.02  # least weight of a shown vote or place


class MosaicsReader(Reader):
    """Reader of a `MemoryMosaics`; see `Reader`. Without retrieval it remembers only the last `SHORT` tokens."""

    classes = MemoryMosaics, MosaicsConfig
    without = f"the same model, remembering {SHORT} tokens"
    chunk_len = SHORT

    @torch.no_grad()
    def read(self, ids: np.ndarray, options: Options) -> Reading:
        tokens = torch.as_tensor(ids, device=self.device)
        whole = self.model(tokens[None])[0]
        short = whole.clone()
        if len(ids) > SHORT:
            pieces = tokens.unfold(0, SHORT, 1)
            short[SHORT - 1 :] = torch.cat([self.model(part)[:, -1] for part in pieces.split(64)])
        off = bits(short, tokens)
        on = bits(whole, tokens) if options.retrieval else off
        return self._reading(ids, on, off, [], {"memories": self._memories(tokens)})

    def _memories(self, tokens: Tensor) -> dict:
        """Return decay and skill of every memory, and for each token its votes [token, weight], places [i, weight]."""
        heads, votes, places, right = [], [], [], []
        n, size = len(tokens), self.model.config.vocab_size
        for number, block in enumerate(inspect(self.model, tokens[None]), 1):
            for head, (decay, skill) in enumerate(zip(block.decay.tolist(), block.skill.tolist())):
                figures = {"decay": round(decay, 3), "skill": round(skill, 3)}
                heads.append({"block": number, "head": head + 1} | figures)
                weight = block.attention[0, head]  # [N,N-1]: place i holds token i+1, which followed token i
                by_token = weight.new_zeros(n, size).index_add_(1, tokens[1:], weight)
                votes.append(_heaviest(by_token, 0))
                places.append(_heaviest(weight, 1))
                found = by_token[:-1].gather(1, tokens[1:, None])[:, 0]
                right.append([0.0, *(round(w, 3) for w in found.tolist())])
        texts = {v: self.tokenizer.decode(np.array([v])) for memory in votes for row in memory for v, _ in row}
        return {"heads": heads, "votes": votes, "places": places, "right": right, "vocabulary": texts}

    def _generate(self, ids: Tensor, options: Options, on: bool, generator: torch.Generator) -> Tensor:
        self.model.limit_memory(None if on else SHORT)
        try:
            return super()._generate(ids, options, on, generator)
        finally:
            self.model.limit_memory(None)


def _heaviest(weights: Tensor, shift: int) -> list[list[list]]:
    """Return the heaviest [number + shift, weight] recalled before each token. weights: [N,n]; row t is token t+1's."""
    values, indices = weights[:-1].topk(min(SHOWN, weights.shape[1]))
    rows = (zip(*row) for row in zip(indices.tolist(), values.tolist()))
    return [[], *([[i + shift, round(w, 3)] for i, w in row if w >= LEAST] for row in rows)]
