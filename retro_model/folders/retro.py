"""Reader of RETRO: the neighbours of each chunk in the library, and their gain."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from retro_model.base import checks
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.store import TokenStore
from retro_model.retro import Retro, RetroConfig

from .documents import Documents
from .reader import Options, Reader
from .reading import TextReading, bits, token_texts


class RetroReader(Reader):
    """Reader of a `Retro`; see `Reader`."""

    classes = Retro, RetroConfig
    without = "the same model, retrieval off"

    def __init__(self, folder, device: str = "cpu", model=None) -> None:
        super().__init__(folder, device, model)
        store, embedder = TokenStore(folder.part("store"), verify=False), HashedTfidf.load(folder.part("embedder"))
        keys = ChunkDatabase.open(folder.part("keys"), store, embedder, verify=False).searcher.keys
        options = {name: folder.facts[name] for name in ("least_similarity", "passage_chunks") if name in folder.facts}
        self.library = Documents(store, keys, embedder, self.tokenizer, **options)
        self.neighbours = folder.facts.get("neighbours", self.neighbours)

    def neighbours_of(self, chunks: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the neighbours `ids` [n,k] of chunks [n,M] as the model takes them: see `Retrieve`."""
        values = self.library.values(ids)
        scored = getattr(self.model.config, "score_bias", False)
        return *values, *([self.library.similarity(chunks, ids)] if scored else [])

    @torch.no_grad()
    def score(self, ids: np.ndarray, options: Options) -> TextReading:
        m = self.model.config.chunk_len
        chunks = ids[: len(ids) // m * m].reshape(-1, m)
        hits, near = np.zeros((0, options.k), np.int64), np.zeros((0, options.k))
        if len(chunks) and options.retrieval:
            hits, near = self.library.search(chunks, options.k)
        given = self.neighbours_of(chunks, hits)
        neighbours, mask = given[:2]
        to = functools.partial(torch.as_tensor, device=self.device)

        def cost(*found: np.ndarray) -> np.ndarray:
            read = zip(checks.RETRIEVED, found if len(chunks) else ())
            return bits(self.model(to(ids)[None], **{name: to(array)[None] for name, array in read})[0], to(ids))

        on = off = cost()
        random = None
        if options.retrieval:
            on, random = cost(*given), cost(*self.neighbours_of(chunks, self.library.drawn(hits)))
        cards: list[list[dict]] = [[] for _ in hits]
        for c, k in np.argwhere(hits >= 0):
            card = self.library.place(int(hits[c, k]))._asdict() | {"score": round(float(near[c, k]), 3)}
            card["texts"] = token_texts(self.tokenizer.decode_bytes, neighbours[c, k][mask[c, k]])
            cards[c].append(card | {"found": int(mask[c, k, :m].sum())})
        extra = {"library": self.library_state()}
        return self._reading(ids, on, off, cards, extra, found=(neighbours, mask), random=random)

    def _generate(self, ids: Tensor, options: Options, on: bool, generator: torch.Generator) -> Tensor:
        def retrieve(chunks: Tensor) -> tuple[Tensor, ...]:
            hits, _ = self.library.search(chunks.cpu().numpy(), options.k)
            return tuple(torch.from_numpy(part) for part in self.neighbours_of(chunks.cpu().numpy(), hits))

        return super()._generate(ids, options, on, generator, retrieve=retrieve if on else None)
