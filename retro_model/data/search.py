"""Searchers: the k nearest chunks of a store outside a given document. Exact search here; FAISS in faiss_index.py.

All return k candidates if there are that many, however many chunks of the excluded document are nearer.
"""

from __future__ import annotations

import numpy as np
import torch

import retro_kernels as rk
from retro_model.base import checks

from .embed import Embedder

KEYS_AT_ONCE = 1 << 17  # embeddings in memory while scanning
QUERIES_AT_ONCE = 4096


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
        self.embedder, self.keys, self.chunk_doc = embedder, keys, chunk_doc
        self.device = checks.usable_device(device)
        self.name = f"exact-l2 {embedder.name}"

    def nearest(self, queries: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """Return ids int64 [n,k] of the chunks nearest to embeddings float32 [n, dim]; -1 if there are fewer.

        exclude_doc: document of each query that is left out [n], -1: none.
        """

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
