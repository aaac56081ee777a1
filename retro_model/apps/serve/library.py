"""A database that can be changed while it is used: documents
forgotten, files added. In memory; nothing on disk changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retro_model.data.database import ChunkDatabase
from retro_model.data.search import DenseSearcher
from retro_model.data.store import Entry, TokenStore

FORGOTTEN = -2  # the number that the chunks of every forgotten document are searched under


class Place(NamedTuple):
    """Where a chunk stands: the document's number, its name, the line that the chunk begins in (from 1)."""

    document: int
    name: str
    line: int


class AddedStore:
    """The part of a `TokenStore` that a `ChunkDatabase` reads, in memory.

    Args:
        chunk_len: M.
        vocab_size: of the tokens.
    """

    def __init__(self, chunk_len: int, vocab_size: int) -> None:
        self.chunk_len, self.vocab_size, self.identity = chunk_len, vocab_size, "added"
        self.tokens, self.lengths = np.zeros((0, chunk_len), np.int64), np.zeros(0, np.int64)
        self.chunk_doc, self.documents = np.zeros(0, np.int64), []

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, name: str, ids: np.ndarray, num_bytes: int) -> int:
        """Adds a document of at least one token; gives its number."""
        m, number = self.chunk_len, len(self.documents)
        rows = -(-len(ids) // m)
        padded = np.zeros(rows * m, np.int64)
        padded[: len(ids)] = ids
        lengths = np.full(rows, m)
        lengths[-1] = len(ids) - (rows - 1) * m
        self.documents.append(Entry(name, "added", len(self), rows, len(ids), num_bytes))
        self.tokens = np.concatenate([self.tokens, padded.reshape(rows, m)])
        self.lengths = np.concatenate([self.lengths, lengths])
        self.chunk_doc = np.concatenate([self.chunk_doc, np.full(rows, number)])
        return number


class Library:
    """What a model looks things up in.

        library = Library(store, keys, embedder, tokenizer)
        ids, similarity = library.search(chunks, k=2)   # [n,2] each
        tokens, mask = library.values(ids)              # [n,2,2M]
        library.forget(library.place(ids[0, 0]).document)

    Chunks and documents are numbered through: those of the store, then those added.

    Args:
        store: the documents on disk.
        keys: float32 [num_chunks,dim], their embeddings, may be memory-mapped.
        embedder: of the keys.
        tokenizer: has `encode(text)` and `decode_bytes(ids)`.
    """

    def __init__(self, store: TokenStore, keys: np.ndarray, embedder, tokenizer) -> None:
        self.store, self.keys, self.embedder, self.tokenizer = store, keys, embedder, tokenizer
        self.newlines = np.array([tokenizer.decode_bytes([i]).count(b"\n") for i in range(store.vocab_size)])
        self.reset()

    def reset(self) -> None:
        """The library as it is on disk."""
        self.added = AddedStore(self.store.chunk_len, self.store.vocab_size)
        self.added_keys = np.zeros((0, self.keys.shape[1]), np.float32)
        self.forgotten: list[int] = []
        self._open()

    def _open(self) -> None:
        """Searchers that leave out what is forgotten."""
        hidden, base = set(self.forgotten), len(self.store.documents)
        self.parts = []
        for store, keys, first in ((self.store, self.keys, 0), (self.added, self.added_keys, base)):
            owner = np.asarray(store.chunk_doc)
            out = np.isin(owner + first, list(hidden))
            self.parts.append(ChunkDatabase(store, DenseSearcher(self.embedder, keys, np.where(out, FORGOTTEN, owner))))

    @property
    def documents(self) -> list[Entry]:
        """Of the store, then added; forgotten ones too."""
        return [*self.store.documents, *self.added.documents]

    def _check(self, document: int) -> int:
        if isinstance(document, bool) or not isinstance(document, int) or not 0 <= document < len(self.documents):
            raise ValueError(f"document: expected a number from 0 to {len(self.documents) - 1}; got {document!r}")
        return document

    def forget(self, document: int) -> None:
        """Searches find nothing of it from now on."""
        if self._check(document) not in self.forgotten:
            self.forgotten.append(document)
            self._open()

    def remember(self, document: int) -> None:
        """Takes `forget` back."""
        if self._check(document) in self.forgotten:
            self.forgotten.remove(document)
            self._open()

    def add(self, name: str, text: str) -> int:
        """Searches find it from now on; gives its number. Raises: ValueError for a text without tokens."""
        ids = np.asarray(self.tokenizer.encode(text), np.int64)
        if not len(ids):
            raise ValueError("text: expected a file with something in it; got an empty one")
        first = len(self.added)
        number = len(self.store.documents) + self.added.append(name, ids, len(text.encode("utf-8", "replace")))
        made = self.embedder(self.added.tokens[first:], self.added.lengths[first:])
        self.added_keys = np.concatenate([self.added_keys, made])
        self._open()
        return number

    def search(self, chunks: np.ndarray, k: int, lengths: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [n,k] (-1: none left) and similarity float32 [n,k]:
        1 - half the squared distance, the cosine of unit vectors.
        """
        lengths = np.full(len(chunks), chunks.shape[1]) if lengths is None else lengths
        queries, ids, near = self.embedder(chunks, lengths), [], []
        for database, keys, first in zip(self.parts, (self.keys, self.added_keys), (0, len(self.store))):
            if not len(keys):
                continue
            hits = database.searcher.nearest(queries, min(k, len(keys)), np.full(len(chunks), FORGOTTEN))
            distance = np.square(queries[:, None] - keys[np.maximum(hits, 0)]).sum(-1)
            near.append(np.where(hits < 0, -np.inf, 1 - distance / 2))
            ids.append(np.where(hits < 0, -1, hits + first))
        ids, near = np.concatenate(ids, 1), np.concatenate(near, 1).astype(np.float32)
        order = np.argsort(-near, 1, kind="stable")[:, :k]
        ids, near = np.take_along_axis(ids, order, 1), np.take_along_axis(near, order, 1)
        missing = ((0, 0), (0, k - ids.shape[1]))
        return np.pad(ids, missing, constant_values=-1), np.pad(near, missing, constant_values=-np.inf)

    def values(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each chunk and what follows it in its document: tokens and mask [...,2M]."""
        base = len(self.store)
        tokens, mask = self.parts[0].values(np.where(ids < base, ids, -1))
        if not len(self.added):
            return tokens, mask
        more, there = self.parts[1].values(np.where(ids < base, -1, ids - base))
        return np.where(there, more, tokens), mask | there

    def place(self, chunk: int) -> Place:
        """Where a chunk that was found stands."""
        base = len(self.store)
        store, first, at = (
            (self.store, 0, chunk) if chunk < base else (self.added, len(self.store.documents), chunk - base)
        )
        number = int(store.chunk_doc[at])
        entry = store.documents[number]
        before = np.asarray(store.tokens[entry.first_chunk : at]).reshape(-1)
        return Place(first + number, entry.name, 1 + int(self.newlines[before].sum()))
