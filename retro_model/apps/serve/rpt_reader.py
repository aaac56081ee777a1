"""Reader of RPT: the neighbours of each chunk in the text's own past, and their gain."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from retro_model.evaluation.rpt import random_chunks
from retro_model.rpt import RPT, RPTConfig

from .reader import Options, Reader
from .reading import Reading, bits, token_texts


class RptReader(Reader):
    """Reader of an `RPT`; see `Reader`."""

    classes = RPT, RPTConfig
    without = "the same model, its window alone"

    @torch.no_grad()
    def read(self, ids: np.ndarray, options: Options) -> Reading:
        m, tokens = self.model.config.chunk_len, torch.as_tensor(ids, device=self.device)[None]
        off = bits(self.model(tokens, retrieval=False)[0], tokens[0])
        logits, retrieved = self.model(tokens, num_neighbours=options.k, return_retrieved=True)
        on, random = bits(logits[0], tokens[0]) if options.retrieval else off, None
        chunks = ids[: len(ids) // m * m].reshape(-1, m)
        if retrieved is None or not len(chunks):
            return self._reading(ids, on, off, [[] for _ in chunks], {})
        if options.retrieval:
            drawn = random_chunks(retrieved.index, self.model.config.excluded_chunks)
            random = bits(self.model(tokens, index=drawn)[0], tokens[0])
        index = retrieved.index[0].cpu().numpy()  # [L,K], of pairs of chunks (j, j+1)
        there = np.maximum(index, 0)
        pairs = np.concatenate([chunks[there], chunks[np.minimum(there + 1, len(chunks) - 1)]], -1)
        mask = np.broadcast_to((index >= 0)[..., None], pairs.shape)
        scores, gates = retrieved.scores[0].cpu().numpy(), retrieved.gate[0].cpu().numpy()
        cards: list[list[dict]] = [[] for _ in index]
        for c, k in np.argwhere(index >= 0):
            j = int(index[c, k])
            card = {"document": 0, "name": f"{c - j} chunks earlier in this text", "token": j * m, "found": m}
            card |= {"score": round(float(scores[c, j]), 2), "gate": round(float(gates[c, k]), 2)}
            cards[c].append(card | {"texts": token_texts(self.tokenizer.decode_bytes, pairs[c, k])})
        return self._reading(ids, on, off, cards, {}, found=(pairs, mask), random=random)

    def _generate(self, ids: Tensor, options: Options, on: bool, generator: torch.Generator) -> Tensor:
        return super()._generate(ids, options, on, generator, retrieval=on)
