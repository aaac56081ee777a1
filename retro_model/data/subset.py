"""A database's neighbours as if it were smaller: whole documents, nested, so that a larger share holds the smaller."""

from __future__ import annotations

import numpy as np

from .database import ChunkDatabase
from .search import DenseSearcher
from .store import TokenStore


def subset_rows(database: ChunkDatabase, share: float, *, seed: int = 0) -> np.ndarray:
    """The chunks, ascending, of so many random documents that they hold about `share` of all chunks: at least one."""
    if not 0 < share <= 1:
        raise ValueError(f"share: expected a number above 0, at most 1; got {share}")
    chunk_doc = np.asarray(database.store.chunk_doc[:])
    order = np.random.default_rng(seed).permutation(len(database.store.documents))
    chunks = np.bincount(chunk_doc, minlength=len(order))[order].cumsum()
    kept = np.zeros(len(order), bool)
    kept[order[: 1 + int(np.searchsorted(chunks, round(share * len(database)), side="left"))]] = True
    return np.flatnonzero(kept[chunk_doc])


def subset_neighbours(database: ChunkDatabase, store: TokenStore, k: int, rows: np.ndarray) -> np.ndarray:
    """The k nearest chunks among `rows` of each chunk of a store, by exact search without its own document: int64
    [num_chunks,k], ids of the whole database, whose `values` they take; -1 where there are fewer.

    Raises:
        ValueError: a database without embeddings (BM25).
    """
    exact = getattr(database.searcher, "exact", database.searcher)
    if not hasattr(exact, "keys"):
        raise ValueError(f"database: expected one of embeddings; got one searched by {database.searcher.name}")
    queries = exact.embedder(store.chunks(np.arange(len(store))), store.lengths)
    part = DenseSearcher(
        exact.embedder,
        np.array(exact.keys[rows], np.float32),
        np.asarray(database.store.chunk_doc[rows]),
        device=exact.device,
    )
    most = min(k, len(rows))
    hits = part.nearest(queries, most, database.documents_of(store)[store.chunk_doc])
    ids = np.full((len(store), k), -1, np.int64)
    ids[:, :most] = np.where(hits < 0, -1, rows[np.maximum(hits, 0)])
    return ids
