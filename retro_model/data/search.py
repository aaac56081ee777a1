"""Searchers: the k nearest chunks of a store, without those of a given document. Dense (exact or FAISS) and lexical (BM25).

All return the k best candidates wherever there are that many, however many chunks of the excluded document lie nearer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

import retro_kernels as rk
from retro_model import disk

from . import files
from .embed import Embedder

KEYS_AT_ONCE = 1 << 17  # embeddings in memory while scanning
QUERIES_AT_ONCE = 4096
EXCLUDED_AT_FIRST = 8  # neighbours that a FAISS search fetches beyond k
FETCHED_AT_MOST = 2048  # after which the exact search takes over


class Searcher(Protocol):
    """name: identifies what it searches by."""

    name: str

    def search(self, chunks: np.ndarray, lengths: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """chunks [n,M], lengths [n], exclude_doc [n] (-1: none). Returns ids int64 [n,k], nearest first, -1 where none is left."""
        ...


class DenseSearcher:
    """Nearest by L2 distance of embeddings: exact, by `rk.topk_chunks` over blocks of the memory-mapped keys.

    Args:
        embedder: of the queries; the keys were made by the same.
        keys: float32 [num_chunks, dim], may be memory-mapped.
        chunk_doc: [num_chunks].
        device: where the scan runs; keys go there a block at a time.
        backend: of `rk.topk_chunks`.
    """

    def __init__(
        self, embedder: Embedder, keys: np.ndarray, chunk_doc: np.ndarray, *, device: str = "cpu", backend: str | None = None
    ) -> None:
        if keys.ndim != 2 or keys.shape != (len(chunk_doc), embedder.dim):
            raise ValueError(f"keys: expected [{len(chunk_doc)},{embedder.dim}]; got {list(keys.shape)}")
        self.embedder, self.keys, self.chunk_doc = embedder, keys, chunk_doc
        self.device, self.backend = device, backend
        self.name = f"exact-l2 {embedder.name}"

    def search(self, chunks, lengths, k, exclude_doc):
        return self.nearest(self.embedder(chunks, lengths), k, exclude_doc)

    def nearest(self, queries: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """ids int64 [n,k] for queries that are embedded already, float32 [n, dim]."""

        def moved(array, dtype):
            return torch.from_numpy(np.array(array, dtype)).to(self.device)[None]  # a copy: a memory map is read-only

        parts = [np.zeros((0, k), np.int64)]
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(start, start + QUERIES_AT_ONCE)
            doc = None if exclude_doc is None else moved(exclude_doc[rows], np.int64)
            stream = rk.TopkStream(moved(queries[rows], np.float32), k, metric="l2", query_doc=doc, backend=self.backend)
            for first in range(0, len(self.keys), KEYS_AT_ONCE):
                block = slice(first, first + KEYS_AT_ONCE)
                key_doc = None if doc is None else moved(self.chunk_doc[block], np.int64)
                stream.update(moved(self.keys[block], np.float32), key_doc=key_doc)
            parts.append(stream.result()[1][0].cpu().numpy())
        return np.concatenate(parts)


class FaissSearcher:
    """Nearest by a FAISS index; what its filtered result lacks of k comes from the exact search.

    A search first fetches a few neighbours too many; queries left with fewer than k outside their document fetch four times
    more, up to 2048, then are searched exactly. So recall is the index's, and the number found is not.

    Args:
        exact: the searcher of the same keys.
        index: a FAISS index of them with L2 metric, or an index factory string ("Flat", "IVF256,Flat", "HNSW32"): built here.
        nprobe: lists an IVF index visits.
        path: where an index built from a string is kept and found again.
    """

    def __init__(self, exact: DenseSearcher, index, *, nprobe: int = 16, path: Path | None = None) -> None:
        self.exact = exact
        self.name = f"faiss {index if isinstance(index, str) else type(index).__name__} nprobe={nprobe} {exact.embedder.name}"
        self.index = build_index(exact.keys, index, path) if isinstance(index, str) else index
        if (self.index.ntotal, self.index.d) != exact.keys.shape:
            raise ValueError(f"index: expected {list(exact.keys.shape)} vectors; got {[self.index.ntotal, self.index.d]}")
        if self.index.metric_type != _faiss().METRIC_L2:
            raise ValueError("index: expected one of L2 metric")
        inverted = _faiss().try_extract_index_ivf(self.index)
        if inverted is not None:
            inverted.nprobe = nprobe

    def search(self, chunks, lengths, k, exclude_doc):
        queries = self.exact.embedder(chunks, lengths)
        found = np.full((len(queries), k), -1, np.int64)
        left, fetch = np.arange(len(queries)), k if exclude_doc is None else k + EXCLUDED_AT_FIRST
        while len(left):
            fetch = min(fetch, self.index.ntotal)
            ids = self.index.search(np.ascontiguousarray(queries[left]), fetch)[1]
            usable = ids >= 0
            if exclude_doc is not None:
                usable &= self.exact.chunk_doc[np.maximum(ids, 0)] != np.asarray(exclude_doc)[left, None]
            order = np.argsort(~usable, axis=1, kind="stable")[:, :k]
            enough = usable.sum(1) >= k
            found[left[enough]] = np.take_along_axis(ids, order, 1)[enough]
            left = left[~enough]
            if fetch >= min(self.index.ntotal, FETCHED_AT_MOST):
                break
            fetch *= 4
        if len(left):
            found[left] = self.exact.nearest(queries[left], k, None if exclude_doc is None else np.asarray(exclude_doc)[left])
        return found


def build_index(keys: np.ndarray, factory: str, path: Path | None = None, *, training: int = 1 << 17):
    """A FAISS index over keys by an index factory string; kept at `path`, a manifest beside it, and read from there the next time.

    Raises:
        ValueError: no such index, too few keys to train it on; a kept file that is truncated, corrupt or of other keys, by name.
    """
    if path is None:
        return _trained_index(keys, factory, training)
    form = files.Form("index", (path.name,))
    with files.Build(path.with_name(path.name + ".json"), form, {"factory": factory, "vectors": list(keys.shape)}) as build:
        if not build.complete:
            unfinished = path.with_name(path.name + ".new")
            disk.remove(unfinished)
            _faiss().write_index(_trained_index(keys, factory, training), str(unfinished))
            build.adopt(path.name, unfinished)
            build.finish()
    return _faiss().read_index(str(path))


def _trained_index(keys: np.ndarray, factory: str, training: int):
    faiss = _faiss()
    try:
        index = faiss.index_factory(keys.shape[1], factory, faiss.METRIC_L2)
    except RuntimeError as error:
        raise ValueError(f"index: expected a FAISS index factory string; got {factory!r} ({error})") from error
    if not index.is_trained:
        rows = np.random.default_rng(0).permutation(len(keys))[:training]
        try:
            index.train(np.array(keys[np.sort(rows)]))
        except RuntimeError as error:
            raise ValueError(f"index: {factory!r} cannot be trained on {len(rows)} chunks ({error})") from error
    for first in range(0, len(keys), KEYS_AT_ONCE):
        index.add(np.array(keys[first : first + KEYS_AT_ONCE]))
    return index


class LexicalSearcher:
    """BM25 over token ids through `bm25s`: the index is built in memory from the store's tokens.

    Equal scores go to the lower id; chunks that share no token score 0 and still count as neighbours.

    Args:
        store: the TokenStore searched.
        k1, b: BM25's.
    """

    def __init__(self, store, *, k1: float = 1.5, b: float = 0.75) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ImportError("LexicalSearcher needs bm25s (pip install 'retro-kernels[retrieval]')") from error
        self.store, self.name = store, f"bm25 k1={k1} b={b}"
        self.index = bm25s.BM25(k1=k1, b=b)
        if len(store):
            rows = [row[:length].tolist() for row, length in zip(store.tokens, store.lengths)]
            self.index.index((rows, {i: i for i in range(store.vocab_size)}), show_progress=False)

    def search(self, chunks, lengths, k, exclude_doc):
        found = np.full((len(chunks), k), -1, np.int64)
        for i, (row, length) in enumerate(zip(chunks, lengths)):
            scores = self.index.get_scores_from_ids(row[:length])
            if exclude_doc is not None:
                scores = np.where(self.store.chunk_doc == exclude_doc[i], -np.inf, scores)
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            ids = np.flatnonzero((scores >= least) & (scores > -np.inf))
            best = ids[np.argsort(-scores[ids], kind="stable")][:k]
            found[i, : len(best)] = best
        return found


def _faiss():
    try:
        import faiss
    except ImportError as error:
        raise ImportError("an index needs faiss (pip install 'retro-kernels[faiss-cpu]')") from error
    return faiss
