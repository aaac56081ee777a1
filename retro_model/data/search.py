"""Searchers: the k nearest chunks of a store outside a given document. Exact and BM25 here; FAISS in faiss_index.py.

All return k candidates if there are that many, however many chunks of the excluded document are nearer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

import retro_kernels as rk

from . import text
from .arrays import of_rows, within
from .embed import Embedder

KEYS_AT_ONCE = 1 << 17  # embeddings in memory while scanning
QUERIES_AT_ONCE = 4096
CHUNKS_AT_ONCE = 1 << 16  # chunks of a BM25 block; a query's scores of it fit the CPU's cache


class Searcher(Protocol):
    """Protocol of searchers. name: identifies the method and its settings."""

    name: str

    def search(self, chunks: np.ndarray, lengths: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """Return ids int64 [n,k], nearest first, -1 if there are fewer; exclude_doc [n] (-1: none)."""


class DenseSearcher:
    """Exact nearest neighbours by L2 distance of embeddings: `rk.topk_chunks` over blocks of the keys.

    Args:
        embedder: embeds the queries; it made the keys.
        keys: float32 [num_chunks, dim], may be memory-mapped.
        chunk_doc: [num_chunks].
        device: device of the scan; keys are copied there a block at a time.
    """

    def __init__(self, embedder: Embedder, keys: np.ndarray, chunk_doc: np.ndarray, *, device: str = "cpu") -> None:
        if keys.ndim != 2 or keys.shape != (len(chunk_doc), embedder.dim):
            raise ValueError(f"keys: expected [{len(chunk_doc)},{embedder.dim}]; got {list(keys.shape)}")
        self.embedder, self.keys, self.chunk_doc, self.device = embedder, keys, chunk_doc, device
        self.name = f"exact-l2 {embedder.name}"

    def search(self, chunks, lengths, k, exclude_doc):
        return self.nearest(self.embedder(chunks, lengths), k, exclude_doc)

    def nearest(self, queries: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """Return ids int64 [n,k] of the chunks nearest to embeddings float32 [n, dim]."""

        def moved(array, dtype):
            return torch.from_numpy(np.array(array, dtype)).to(self.device)[None]  # a copy: a memory map is read-only

        parts = [np.zeros((0, k), np.int64)]
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(start, start + QUERIES_AT_ONCE)
            doc = None if exclude_doc is None else moved(exclude_doc[rows], np.int64)
            stream = rk.TopkStream(moved(queries[rows], np.float32), k, metric="l2", query_doc=doc)
            for first in range(0, len(self.keys), KEYS_AT_ONCE):
                block = slice(first, first + KEYS_AT_ONCE)
                key_doc = None if doc is None else moved(self.chunk_doc[block], np.int64)
                stream.update(moved(self.keys[block], np.float32), key_doc=key_doc)
            parts.append(stream.result()[1][0].cpu().numpy())
        return np.concatenate(parts)

    def similarity(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return 1 - (squared distance) / 2 of each query [n,dim] to its chunks `ids` [n,k], float32 [n,k].

        This is the cosine if all vectors have unit length. -inf for the id -1.
        """
        distance = np.square(queries[:, None] - self.keys[np.maximum(ids, 0)]).sum(-1)
        return np.where(ids < 0, -np.inf, 1 - distance / 2).astype(np.float32)


class LexicalSearcher:
    """BM25 over token ids, in C++, without an index on disk.

    Each call reads the store's tokens block by block, so memory is bounded. Search many queries in one call.

        score(c, q) = sum over q's tokens of idf * tf / (tf + k1 (1 - b + b |c| / mean |c|))
        idf = log(1 + (N - n + 0.5) / (n + 0.5))

    Of equal scores the lower id comes first. Chunks that share no token have score 0 and still count as neighbours.

    Args:
        store: the TokenStore to search.
        k1, b: BM25's saturation of a token's count, weight of a chunk's length.
        counts: number of chunks that hold each token, int64 [vocab_size], if it is known; None: counted here.

    Source: Robertson and Zaragoza, 2009; the idf as in Lucene.
    """

    def __init__(self, store, *, k1: float = 1.5, b: float = 0.75, counts: np.ndarray | None = None) -> None:
        self.store, self.k1, self.b, self.name = store, float(k1), float(b), f"bm25 k1={k1} b={b}"
        if counts is None:
            counts = np.zeros(store.vocab_size, np.int64)
            for _, tokens, lengths in self._blocks():
                text.native().count_chunks(tokens, lengths, counts)
        elif counts.shape != (store.vocab_size,):
            raise ValueError(f"counts: expected [{store.vocab_size}]; got {list(counts.shape)}")
        self.counts = counts
        self.idf = np.log1p((len(store) - counts + 0.5) / (counts + 0.5)).astype(np.float32)
        self.mean = store.num_tokens / max(1, len(store))

    def _blocks(self):
        """Yield the first chunk, tokens and lengths of each block."""
        for first in range(0, len(self.store), CHUNKS_AT_ONCE):
            rows = slice(first, first + CHUNKS_AT_ONCE)
            checked = self._checked(f"{self.store.folder}", self.store.tokens[rows], self.store.lengths[rows], np.int32)
            yield first, *checked

    def _checked(self, name: str, tokens, lengths, lengths_type) -> tuple[np.ndarray, np.ndarray]:
        """Return checked copies for C++: a store opened without `verify`, or a caller, may pass any token id."""
        tokens = np.asarray(tokens)
        lengths = of_rows(f"{name}: lengths", lengths, len(tokens), 0, tokens.shape[1]).astype(lengths_type)
        real = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
        return within(name, real, 0, self.store.vocab_size - 1, "token ids").astype(np.int32), lengths

    def search(self, chunks, lengths, k, exclude_doc):
        best, hits = np.full((len(chunks), k), -np.inf, np.float32), np.full((len(chunks), k), -1, np.int64)
        excluded = np.full(len(chunks), -1, np.int64) if exclude_doc is None else np.array(exclude_doc, np.int64)
        queries = *self._checked("chunks", chunks, lengths, np.int64), excluded
        for first, tokens, sizes in self._blocks():
            documents = np.array(self.store.chunk_doc[first : first + len(tokens)], np.int64)
            block = tokens, sizes, documents, first, self.idf, self.k1, self.b, self.mean
            text.native().lexical_search(*block, *queries, best, hits, torch.get_num_threads())
        return hits
