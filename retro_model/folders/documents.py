"""Database that changes while it is used: documents are forgotten, files added. Changes are in memory, not on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retro_model.data.database import ChunkDatabase
from retro_model.data.search import DenseSearcher
from retro_model.data.store import Entry, TokenStore
from retro_model.data.text_files import binary_sign

LARGEST_FILE, MOST_ADDED = 256 << 10, 1 << 20  # bytes of an added file, and of all; keys take 50 times as many
FORGOTTEN = -2  # document number of all forgotten chunks, which searches leave out


class Place(NamedTuple):
    """Position of a chunk: number and name of its document, and the line in which it begins, from 1."""

    document: int
    name: str
    line: int


class AddedStore:
    """Token store in memory, with the attributes of a `TokenStore` that a `ChunkDatabase` reads."""

    def __init__(self, chunk_len: int, vocab_size: int) -> None:
        self.chunk_len, self.vocab_size, self.identity = chunk_len, vocab_size, "added"
        self.tokens, self.lengths = np.zeros((0, chunk_len), np.int64), np.zeros(0, np.int64)
        self.chunk_doc, self.documents = np.zeros(0, np.int64), []

    def __len__(self) -> int:
        return len(self.tokens)

    def with_document(self, name: str, ids: np.ndarray, num_bytes: int) -> AddedStore:
        """Return a store with one more document, of at least one token."""
        m, rows = self.chunk_len, -(-len(ids) // self.chunk_len)
        padded = np.pad(ids, (0, rows * m - len(ids))).reshape(rows, m)
        made = AddedStore(m, self.vocab_size)
        made.documents = [*self.documents, Entry(name, "added", len(self), rows, len(ids), num_bytes)]
        made.tokens = np.concatenate([self.tokens, padded])
        made.lengths = np.concatenate([self.lengths, np.minimum(m, len(ids) - m * np.arange(rows))])
        made.chunk_doc = np.concatenate([self.chunk_doc, np.full(rows, len(self.documents))])
        return made


class Documents:
    """Documents that a model retrieves from.

        library = Documents(store, keys, embedder, tokenizer)
        ids, similarity = library.search(chunks, k=2)   # [n,2] each
        tokens, mask = library.values(ids)              # [n,2,PM]
        library.forget(library.place(ids[0, 0]).document)

    Numbers of chunks and documents count the store's, then the added ones.

    store: the documents on disk. keys: float32 [num_chunks,dim], the chunks' embeddings by `embedder`; may be
    memory-mapped. tokenizer: has `encode(text)` and `decode_bytes(ids)`. least_similarity: similarity to a query below
    which a chunk is not retrieved. passage_chunks: see `ChunkDatabase`.
    """

    def __init__(
        self,
        store: TokenStore,
        keys: np.ndarray,
        embedder,
        tokenizer,
        *,
        least_similarity: float = -np.inf,
        passage_chunks: int = ChunkDatabase.passage_chunks,
    ) -> None:
        self.store, self.keys, self.embedder, self.tokenizer = store, keys, embedder, tokenizer
        self.least_similarity, self.passage_chunks = least_similarity, passage_chunks
        self.newlines = np.array([tokenizer.decode_bytes([i]).count(b"\n") for i in range(store.vocab_size)])
        self.reset()

    def reset(self) -> None:
        """Return to the library on disk."""
        added = AddedStore(self.store.chunk_len, self.store.vocab_size)
        self._open(added, np.zeros((0, self.keys.shape[1]), np.float32), [])

    def _open(self, added: AddedStore, added_keys: np.ndarray, forgotten: list[int]) -> None:
        """Open databases of the store and of the added documents, without the forgotten ones."""
        parts, first = [], 0
        for store, keys in ((self.store, self.keys), (added, added_keys)):
            owner = np.asarray(store.chunk_doc)
            shown = np.where(np.isin(owner + first, forgotten), FORGOTTEN, owner)
            parts.append(ChunkDatabase(store, DenseSearcher(self.embedder, keys, shown)))
            parts[-1].passage_chunks, first = self.passage_chunks, len(self.store.documents)
        self.parts, self.added, self.added_keys, self.forgotten = parts, added, added_keys, forgotten

    @property
    def documents(self) -> list[Entry]:
        """Documents of the store, then the added ones, including forgotten ones."""
        return [*self.store.documents, *self.added.documents]

    def _check(self, document: int) -> int:
        if type(document) is not int or not 0 <= document < len(self.documents):
            raise ValueError(f"document: expected a number from 0 to {len(self.documents) - 1}; got {document!r}")
        return document

    def forget(self, document: int) -> None:
        """Leave a document out of later searches."""
        if self._check(document) not in self.forgotten:
            self._open(self.added, self.added_keys, [*self.forgotten, document])

    def remember(self, document: int) -> None:
        """Undo `forget`."""
        if self._check(document) in self.forgotten:
            self._open(self.added, self.added_keys, [number for number in self.forgotten if number != document])

    def add(self, name: str, text: str) -> int:
        """Add a document to later searches and return its number. An error leaves the library unchanged.

        Raises: ValueError for a text without tokens, of more than `LARGEST_FILE` bytes, or beyond `MOST_ADDED` in all.
        """
        size, held = len(text.encode("utf-8", "replace")), sum(entry.num_bytes for entry in self.added.documents)
        got = f"got {size / 1024:,.0f} KB"
        if size > LARGEST_FILE:
            raise ValueError(f"text: expected a file of at most {LARGEST_FILE >> 10} KB; {got}")
        if held + size > MOST_ADDED:
            most = f"text: expected at most {MOST_ADDED >> 10} KB added in all"
            raise ValueError(f"{most}; {got} beside {held / 1024:,.0f}: reset the library first")
        if sign := binary_sign(text):
            raise ValueError(f"text: expected a text file; got {sign} in {name}")
        ids = np.asarray(self.tokenizer.encode(text), np.int64)
        if not len(ids):
            raise ValueError("text: expected a file with something in it; got an empty one")
        added, new = self.added.with_document(name, ids, size), slice(len(self.added), None)
        keys = np.concatenate([self.added_keys, self.embedder(added.tokens[new], added.lengths[new])])
        self._open(added, keys, self.forgotten)
        return len(self.documents) - 1

    def _queries(self, chunks: np.ndarray) -> np.ndarray:
        return self.embedder(chunks, np.full(len(chunks), chunks.shape[1]))

    def search(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int64 [n,k], -1 for none, and similarities float32 [n,k], see `DenseSearcher.similarity`."""
        queries, ids, near = self._queries(chunks), [], []
        for database, first in zip(self.parts, (0, len(self.store))):
            if len(database):
                hits = database.searcher.nearest(queries, min(k, len(database)), np.full(len(chunks), FORGOTTEN))
                near.append(database.searcher.similarity(queries, hits))
                ids.append(np.where(near[-1] < self.least_similarity, -1, hits + first * (hits >= 0)))
        ids, near = np.concatenate(ids, 1), np.concatenate(near, 1)
        order = np.argsort(-near, 1, kind="stable")[:, :k]
        ids, near = np.take_along_axis(ids, order, 1), np.take_along_axis(near, order, 1)
        missing = ((0, 0), (0, k - ids.shape[1]))
        return np.pad(ids, missing, constant_values=-1), np.pad(near, missing, constant_values=-np.inf)

    def _by_part(self, ids: np.ndarray) -> list[tuple[ChunkDatabase, np.ndarray]]:
        """Return each part that holds chunks, with `ids` in its own numbering: -1 for chunks of the other part."""
        base = len(self.store)
        own = np.where(ids < base, ids, -1), np.where(ids < base, -1, ids - base)
        return [(part, of_part) for part, of_part in zip(self.parts, own) if len(part)]

    def drawn(self, ids: np.ndarray, seed: int = 0) -> np.ndarray:
        """Return a random chunk, not a forgotten one, for each id but -1: the control of `search`."""
        shown = [np.flatnonzero(part.searcher.chunk_doc != FORGOTTEN) for part in self.parts]
        every = np.concatenate([shown[0], shown[1] + len(self.store)])
        return np.where(ids < 0, -1, np.random.default_rng(seed).choice(every if len(every) else [-1], ids.shape))

    def values(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask [...,PM] of each chunk and its continuation."""
        (tokens, mask), *added = [part.values(own) for part, own in self._by_part(ids)]
        for more, there in added:
            tokens, mask = np.where(there, more, tokens), mask | there
        return tokens, mask

    def place(self, chunk: int) -> Place:
        """Return the position of a chunk."""
        store, first = self.store, 0
        if chunk >= len(self.store):
            store, first, chunk = self.added, len(self.store.documents), chunk - len(self.store)
        number = int(store.chunk_doc[chunk])
        entry = store.documents[number]
        before = np.asarray(store.tokens[entry.first_chunk : chunk]).reshape(-1)
        return Place(first + number, entry.name, 1 + int(self.newlines[before].sum()))
