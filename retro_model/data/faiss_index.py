"""Search by a FAISS index, which is built once and kept, and its recall against the exact search."""

from __future__ import annotations

import functools
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch

from . import building, files
from .building import library
from .embed import Embedder
from .search import KEYS_AT_ONCE, DenseSearcher
from .shards import Joined

EXCLUDED_AT_FIRST = 8  # neighbours beyond k that a search with excluded documents fetches first
FETCHED_AT_MOST = 2048  # neighbours fetched from the index before the exact search takes over
TRAINING_KEYS = 1 << 17  # least number of keys that an index is trained on
KEYS_A_LIST = 64  # training keys a list; FAISS warns below 39 and uses at most 256
LOSSY = ("PQ", "SQ", "RQ", "ITQ", "LSH")  # codes whose distances are approximate
RERANKED = 8  # candidates that a lossy index fetches for each neighbour
QUERIES_AT_ONCE = 64  # queries whose candidates' keys are in memory together
RECALL_AT, RECALL_SAMPLE = (1, 2, 10), 512  # numbers of neighbours; number of queries


class FaissSearcher(DenseSearcher):
    """Nearest neighbours by a FAISS index, completed by the exact search.

    A search fetches a few more than k neighbours. A query that has fewer than k outside its document fetches four times
    as many, up to 2048, and is then searched exactly. So the index decides the recall, but never the number found.

    An index is built once and kept at `path`. If the factory string names a lossy code (PQ, SQ, ...), a search fetches
    8 candidates for each neighbour and sorts them by exact distance to the stored keys.

    Args:
        embedder, keys, chunk_doc, device: of the exact search, see `DenseSearcher`.
        index: FAISS index factory string ("Flat", "IVF256,Flat", "HNSW32").
        path: file of the index.
        nprobe: lists that an IVF index visits.
        verify: compare the checksums of a kept index whose lists are mapped; others are always compared.
        executor: fills the shards of an IVF index, see `building`; None: this process.

    Raises: ValueError: unknown factory string; too few keys to train on; a kept file that is corrupt or of other keys.
    """

    def __init__(
        self,
        embedder: Embedder,
        keys: np.ndarray,
        chunk_doc: np.ndarray,
        index: str,
        path: Path,
        *,
        device: str = "cpu",
        nprobe: int = 16,
        verify: bool = True,
        executor: Executor | None = None,
    ) -> None:
        super().__init__(embedder, keys, chunk_doc, device=device)
        self.rerank = RERANKED if any(code in index for code in LOSSY) else 0
        self.name = f"faiss {index} nprobe={nprobe} {embedder.name}"
        self.name += f" rerank={self.rerank}" if self.rerank else ""
        merged = building.mergeable(made(keys.shape[1], index))
        form = files.Form("index", (path.name, path.name + building.LISTS) if merged else (path.name,))
        manifest, settings = path.with_name(path.name + ".json"), {"factory": index, "vectors": list(keys.shape)}
        with files.Build(manifest, form, settings, verify=verify or not merged) as build:
            if not build.complete:
                if merged:
                    shards = keys if isinstance(keys, Joined) else Joined([keys])
                    building.fill_and_merge(lambda: _trained(keys, index), shards, path, build, executor)
                else:
                    whole = _trained(keys, index)
                    for first in range(0, len(keys), KEYS_AT_ONCE):
                        whole.add(np.array(keys[first : first + KEYS_AT_ONCE], np.float32))
                    build.adopt(path.name, building.written(whole, path.with_name(path.name + ".whole")))
                build.finish()
        flags = library().IO_FLAG_ONDISK_SAME_DIR | library().IO_FLAG_READ_ONLY  # maps merged lists, also if moved
        kept = library().read_index(str(path), flags)
        inverted = library().try_extract_index_ivf(kept)
        if inverted is not None:
            inverted.nprobe = nprobe
        self.index = _on_device(kept, device)

    def nearest(self, queries: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        hits = np.full((len(queries), k), -1, np.int64)
        left, fetch = np.arange(len(queries)), max(k if exclude_doc is None else k + EXCLUDED_AT_FIRST, self.rerank * k)
        while len(left):
            fetch = min(fetch, self.index.ntotal)
            ids = self.index.search(np.ascontiguousarray(queries[left]), fetch)[1]
            usable = ids >= 0
            if exclude_doc is not None:
                usable &= self.chunk_doc[np.maximum(ids, 0)] != np.asarray(exclude_doc)[left, None]
            away = _distances(self.keys, queries[left], np.where(usable, ids, -1)) if self.rerank else ~usable
            order = np.argsort(away, axis=1, kind="stable")[:, :k]
            enough = usable.sum(1) >= k
            hits[left[enough]] = np.take_along_axis(ids, order, 1)[enough]
            left = left[~enough]
            if fetch >= min(self.index.ntotal, FETCHED_AT_MOST):
                break
            fetch *= 4
        if len(left):
            excluded = None if exclude_doc is None else np.asarray(exclude_doc)[left]
            hits[left] = super().nearest(queries[left], k, excluded)
        return hits

    @functools.cached_property
    def recall(self) -> dict[int, float]:
        """recall@k against the exact search: {k: share of the neighbours found} for k in RECALL_AT, measured once.

        The queries are keys drawn at random; each search excludes the key's own document. A neighbour counts if it is
        no farther than the k-th of the exact search, so equal chunks are interchangeable.
        """
        rows = np.sort(np.random.default_rng(0).permutation(len(self.keys))[:RECALL_SAMPLE])
        queries, documents = np.array(self.keys[rows], np.float32), np.asarray(self.chunk_doc[rows])
        ks = [k for k in RECALL_AT if k <= len(self.keys)]
        nearest = _distances(self.keys, queries, super().nearest(queries, max(ks), documents))
        recall = {}
        for k in ks:
            want = nearest[:, :k]
            got = _distances(self.keys, queries, self.nearest(queries, k, documents))
            exist = np.isfinite(want)
            farthest = np.where(exist, want, -np.inf).max(1, keepdims=True)
            recall[k] = float(((got <= farthest) & exist).sum() / max(1, exist.sum()))
        return recall


def _distances(keys: np.ndarray, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return squared distances, float64 [n,k]; infinite for the id -1."""
    distances = np.empty(ids.shape)
    for first in range(0, len(ids), QUERIES_AT_ONCE):
        rows = slice(first, first + QUERIES_AT_ONCE)
        away = keys[np.maximum(ids[rows], 0)].astype(np.float64) - queries[rows, None]
        distances[rows] = (away**2).sum(-1)
    return np.where(ids < 0, np.inf, distances)


def made(dim: int, factory: str):
    """Return an untrained index without keys, by L2. Raise ValueError, naming `index`, for a bad string."""
    try:
        return library().index_factory(dim, factory, library().METRIC_L2)
    except RuntimeError as error:
        raise ValueError(f"index: expected a FAISS index factory string; got {factory!r} ({error})") from error


def _trained(keys: np.ndarray, factory: str):
    """Return a trained index without keys."""
    index = made(keys.shape[1], factory)
    if not index.is_trained:
        inverted = library().try_extract_index_ivf(index)
        rows = _training_rows(len(keys), 0 if inverted is None else inverted.nlist)
        try:
            index.train(np.array(keys[rows], np.float32))
        except RuntimeError as error:
            raise ValueError(f"index: {factory!r} cannot be trained on {len(rows)} chunks ({error})") from error
    return index


def _training_rows(keys: int, lists: int) -> np.ndarray:
    """Return the rows that an index is trained on: a sample that grows with the number of inverted lists."""
    return np.sort(np.random.default_rng(0).permutation(keys)[: max(TRAINING_KEYS, KEYS_A_LIST * lists)])


def _on_device(index, device: str):
    """Copy the index to the GPU if `device` is one and FAISS supports GPUs; otherwise return it unchanged."""
    faiss, device = library(), torch.device(device)
    if device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return index
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device.index or 0, index)
