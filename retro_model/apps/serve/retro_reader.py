"""Reader of RETRO: the neighbours of each chunk in the library, and their gain."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.data.database import KEYS, ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.store import TokenStore
from retro_model.retro import Retro, RetroConfig

from .library import Library
from .reader import Options, Reader
from .reading import Reading, bits, token_texts


class RetroReader(Reader):
    """Reader of a `Retro`; see `Reader`."""

    without = "the same model, retrieval off"

    def __init__(self, folder, device: str = "cpu") -> None:
        super().__init__(folder, device)
        store, embedder = TokenStore(folder.part("store"), verify=False), HashedTfidf.load(folder.part("embedder"))
        self.database = ChunkDatabase.open(  # checks that keys and store belong together
            folder.part("keys"), store, embedder, verify=False
        )
        keys = np.load(folder.part("keys") / KEYS, mmap_mode="r")
        least = float(folder.facts.get("least_similarity", -np.inf))
        chunks = folder.facts.get("passage_chunks", ChunkDatabase.passage_chunks)
        options = {"least_similarity": least, "passage_chunks": chunks}
        self.library = Library(self.database.store, keys, embedder, self.tokenizer, **options)
        self.neighbours = folder.facts.get("neighbours", self.neighbours)

    def _model(self) -> nn.Module:
        return self._load(Retro, RetroConfig)

    def neighbours_of(self, chunks: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the neighbours `ids` [n,k] of chunks [n,M] as the model takes them: see `Retrieve`."""
        values = self.library.values(ids)
        scored = getattr(self.model.config, "score_bias", False)
        return *values, *([self.library.similarity(chunks, ids)] if scored else [])

    def _logits(self, ids: np.ndarray, *found: np.ndarray) -> Tensor:
        """Return logits [N,V]."""
        to = lambda array: torch.as_tensor(array, device=self.device)[None]  # noqa: E731
        if not found or not len(found[0]):
            return self.model(to(ids))[0]
        return self.model(to(ids), **{name: to(array) for name, array in zip(checks.RETRIEVED, found)})[0]

    @torch.no_grad()
    def read(self, ids: np.ndarray, options: Options) -> Reading:
        m = self.model.config.chunk_len
        chunks = ids[: len(ids) // m * m].reshape(-1, m)
        hits, near = np.zeros((0, options.k), np.int64), np.zeros((0, options.k))
        if len(chunks) and options.retrieval:
            hits, near = self.library.search(chunks, options.k)
        given = self.neighbours_of(chunks, hits)
        neighbours, mask = given[:2]
        cost = lambda *found: bits(self._logits(ids, *found), torch.as_tensor(ids, device=self.device))  # noqa: E731
        on = off = cost()
        random = None
        if options.retrieval:
            on, random = cost(*given), cost(*self.neighbours_of(chunks, self.library.drawn(hits)))
        cards = [
            [self._card(*what) for what in zip(*of_chunk) if what[0] >= 0]
            for of_chunk in zip(hits, near, neighbours, mask)
        ]
        extra = {"library": self.library_state()}
        return self._reading(ids, on, off, cards, extra, found=(neighbours, mask), random=random)

    def _card(self, chunk: int, near: float, tokens: np.ndarray, mask: np.ndarray) -> dict:
        """Return the fields of a neighbour that the page shows."""
        place = self.library.place(int(chunk))
        return {
            "document": place.document,
            "name": place.name,
            "line": place.line,
            "score": round(float(near), 3),
            "texts": token_texts(self.tokenizer.decode_bytes, tokens[mask]),
            "found": int(mask[: self.model.config.chunk_len].sum()),
        }

    def _generate(self, ids: Tensor, options: Options, on: bool, generator: torch.Generator) -> Tensor:
        def retrieve(chunks: Tensor) -> tuple[Tensor, ...]:
            hits, _ = self.library.search(chunks.cpu().numpy(), options.k)
            return tuple(torch.from_numpy(part) for part in self.neighbours_of(chunks.cpu().numpy(), hits))

        return self._sample(ids, options, generator, retrieve=retrieve if on else None)
