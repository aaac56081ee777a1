"""Search by a FAISS index: built once, kept with its recall against the exact search, filtered without loss of
neighbours."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch

from retro_model.base import disk

from . import files, index_shards
from .search import KEYS_AT_ONCE, DenseSearcher
from .shards import Joined

EXCLUDED_AT_FIRST = 8  # neighbours that a search fetches beyond k
FETCHED_AT_MOST = 2048  # after which the exact search takes over
TRAINING_KEYS = 1 << 17  # that an index is trained on, at least
KEYS_A_LIST = 64  # FAISS warns below 39 for each centroid and uses 256 at most
# codes that order candidates but roughly; candidates sorted anew for a neighbour
LOSSY, RERANKED = (("PQ", "SQ", "RQ", "ITQ", "LSH"), 8)
QUERIES_AT_ONCE = 64  # whose candidates' keys are in memory
RECALL_AT, RECALL_SAMPLE = (1, 2, 10), 512  # numbers of neighbours; keys that are searched for


class FaissSearcher:
    """Nearest by a FAISS index; what its filtered result lacks of k comes from the exact search.

    A search first fetches a few neighbours too many; queries left with fewer than k outside their document fetch four
    times more, up to 2048, then are searched exactly. So recall is the index's, and the number found is not.

    Attributes:
        recall: {k: share} by `measured_recall`; empty for an index that is given whole.

    Args:
        exact: the searcher of the same keys.
        index: a FAISS index of them with L2 metric, or an index factory string ("Flat", "IVF256,Flat", "HNSW32"): built
            here.
        nprobe: lists an IVF index visits.
        rerank: candidates fetched for each neighbour and sorted by their exact distances, from the stored keys; None: 8
            where the factory string names a lossy code (PQ, SQ, ...), else 0, the index's own order.
        executor: fills the shards of an IVF index, see `executors`; None: here.
        path: where an index built from a string is kept and found again, its recall in the manifest beside it.
        verify: compare the checksums of a kept one that is mapped.

    Raises:
        ValueError: no such index, too few keys to train it on; a kept file that is truncated, corrupt or of other keys,
            by name.
    """

    def __init__(
        self,
        exact: DenseSearcher,
        index,
        *,
        nprobe: int = 16,
        rerank: int | None = None,
        path: Path | None = None,
        verify: bool = True,
        executor: Executor | None = None,
    ) -> None:
        self.exact, self.nprobe, self.recall, self.executor = exact, nprobe, {}, executor
        if rerank is None:
            rerank = RERANKED if isinstance(index, str) and any(code in index for code in LOSSY) else 0
        self.rerank = rerank
        kind = index if isinstance(index, str) else type(index).__name__
        self.name = f"faiss {kind} nprobe={nprobe} {exact.embedder.name}"
        self.name += f" rerank={rerank}" if rerank else ""
        if not isinstance(index, str):
            self._use(index)
        elif path is None:
            self._use(_trained_index(exact.keys, index))
            self.recall = measured_recall(self)
        elif index_shards.mergeable(made(exact.keys.shape[1], index)) and not index_shards.in_one_file(path):
            self._build_shards(index, path, verify)
        else:
            self._build(index, path)

    def _use(self, index) -> None:
        if (index.ntotal, index.d) != self.exact.keys.shape:
            raise ValueError(f"index: expected {list(self.exact.keys.shape)} vectors; got {[index.ntotal, index.d]}")
        if index.metric_type != library().METRIC_L2:
            raise ValueError("index: expected one of L2 metric")
        inverted = library().try_extract_index_ivf(index)
        if inverted is not None:
            inverted.nprobe = self.nprobe
        self.index = _on_device(index, self.exact.device)

    def _use_kept(self, index, manifest: Path, form: files.Form, facts: dict) -> None:
        """Use an index that was built before. Its recall at this nprobe is in the manifest, or measured and added."""
        self._use(index)
        known = facts.get("recall", {})
        self.recall = _read_recall(known, self.nprobe) or measured_recall(self)
        files.amend(manifest, form, recall=known | _written_recall(self.recall, self.nprobe))

    def _build(self, factory: str, path: Path) -> None:
        """Reads the index kept at `path`, or builds and keeps it; its recall too, for each nprobe."""
        manifest, form = path.with_name(path.name + ".json"), files.Form("index", (path.name,))
        with files.Build(manifest, form, {"factory": factory, "vectors": list(self.exact.keys.shape)}) as build:
            if build.complete:
                self._use_kept(library().read_index(str(path)), manifest, form, build.facts)
            else:
                self._use(_trained_index(self.exact.keys, factory))
                self.recall = measured_recall(self)
                unfinished = path.with_name(path.name + ".new")
                disk.remove(unfinished)
                library().write_index(self.index, str(unfinished))
                build.adopt(path.name, unfinished)
                build.finish(recall=_written_recall(self.recall, self.nprobe))

    def _build_shards(self, factory: str, path: Path, verify: bool) -> None:
        """`_build` of an index whose shards are filled side by side and whose lists are mapped, not read."""
        keys = self.exact.keys if isinstance(self.exact.keys, Joined) else Joined([self.exact.keys])
        manifest, form = path.with_name(path.name + ".json"), index_shards.form(path)
        settings = {"factory": factory, "vectors": list(self.exact.keys.shape)}
        if manifest.exists() and files.read_manifest(manifest, form)["complete"]:
            manifest_there = files.read_manifest(manifest, form, complete=True)
            files.same_settings(manifest, settings, manifest_there["settings"])
            files.check_files(manifest, form, manifest_there, verify=verify)
            return self._use_kept(index_shards.opened(path), manifest, form, manifest_there["facts"])
        with files.Build(manifest, form, settings) as build:
            if not build.complete:
                index_shards.fill_and_merge(
                    lambda: _trained(self.exact.keys, factory), keys, path, build, self.executor
                )
                self._use(index_shards.opened(path))
                self.recall = measured_recall(self)
                build.finish(recall=_written_recall(self.recall, self.nprobe))

    def search(self, chunks, lengths, k, exclude_doc):
        return self.nearest(self.exact.embedder(chunks, lengths), k, exclude_doc)

    def nearest(self, queries: np.ndarray, k: int, exclude_doc: np.ndarray | None) -> np.ndarray:
        """ids int64 [n,k] for queries that are embedded already, float32 [n, dim]."""
        hits = np.full((len(queries), k), -1, np.int64)
        left, fetch = np.arange(len(queries)), max(k if exclude_doc is None else k + EXCLUDED_AT_FIRST, self.rerank * k)
        while len(left):
            fetch = min(fetch, self.index.ntotal)
            ids = self.index.search(np.ascontiguousarray(queries[left]), fetch)[1]
            usable = ids >= 0
            if exclude_doc is not None:
                usable &= self.exact.chunk_doc[np.maximum(ids, 0)] != np.asarray(exclude_doc)[left, None]
            away = _distances(self.exact.keys, queries[left], np.where(usable, ids, -1)) if self.rerank else ~usable
            order = np.argsort(away, axis=1, kind="stable")[:, :k]
            enough = usable.sum(1) >= k
            hits[left[enough]] = np.take_along_axis(ids, order, 1)[enough]
            left = left[~enough]
            if fetch >= min(self.index.ntotal, FETCHED_AT_MOST):
                break
            fetch *= 4
        if len(left):
            hits[left] = self.exact.nearest(
                queries[left], k, None if exclude_doc is None else np.asarray(exclude_doc)[left]
            )
        return hits


def measured_recall(
    searcher: FaissSearcher, ks: tuple[int, ...] = RECALL_AT, sample: int = RECALL_SAMPLE
) -> dict[int, float]:
    """recall@k against the exact search, for keys drawn at random, each without its own document.

    A neighbour counts where it is no farther than the k-th of the exact search, so that equal chunks are as good as
    each other.

        database.searcher.recall == {1: 0.51, 2: 0.48, 10: 0.41}

    Returns:
        {k: share of the neighbours found}, for each k up to the number of chunks.
    """
    exact = searcher.exact
    rows = np.sort(np.random.default_rng(0).permutation(len(exact.keys))[:sample])
    queries, documents = np.array(exact.keys[rows], np.float32), np.asarray(exact.chunk_doc[rows])
    ks = [k for k in ks if k <= len(exact.keys)]
    # its first k are the k nearest
    nearest = _distances(exact.keys, queries, exact.nearest(queries, max(ks), documents))
    recall = {}
    for k in ks:
        want = nearest[:, :k]
        got = _distances(exact.keys, queries, searcher.nearest(queries, k, documents))
        exist = np.isfinite(want)
        farthest = np.where(exist, want, -np.inf).max(1, keepdims=True)
        recall[k] = float(((got <= farthest) & exist).sum() / max(1, exist.sum()))
    return recall


def _distances(keys: np.ndarray, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Squared, float64 [n,k]; infinite for the id -1."""
    distances = np.empty(ids.shape)
    for first in range(0, len(ids), QUERIES_AT_ONCE):
        rows = slice(first, first + QUERIES_AT_ONCE)
        away = keys[np.maximum(ids[rows], 0)].astype(np.float64) - queries[rows, None]
        distances[rows] = (away**2).sum(-1)
    return np.where(ids < 0, np.inf, distances)


def _written_recall(recall: dict[int, float], nprobe: int) -> dict:
    return {str(nprobe): {str(k): share for k, share in recall.items()}}


def _read_recall(known, nprobe: int) -> dict[int, float]:
    """Recall figures of a manifest; empty if they are absent or malformed."""
    try:
        recall = {int(k): float(share) for k, share in known[str(nprobe)].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return recall if all(0 <= share <= 1 for share in recall.values()) else {}


def _trained_index(keys: np.ndarray, factory: str):
    """A trained index that holds all keys."""
    index = _trained(keys, factory)
    for first in range(0, len(keys), KEYS_AT_ONCE):
        index.add(np.array(keys[first : first + KEYS_AT_ONCE], np.float32))
    return index


def made(dim: int, factory: str, name: str = "index", metric: int | None = None):
    """An index without keys, untrained. metric: None: L2. Raises: ValueError, naming `name`, for no factory string."""
    faiss = library()
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_L2 if metric is None else metric)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected a FAISS index factory string; got {factory!r} ({error})") from error


def _trained(keys: np.ndarray, factory: str):
    """A trained index without keys."""
    faiss, index = library(), made(keys.shape[1], factory)
    if not index.is_trained:
        inverted = faiss.try_extract_index_ivf(index)
        rows = _training_rows(len(keys), 0 if inverted is None else inverted.nlist)
        try:
            index.train(np.array(keys[rows], np.float32))
        except RuntimeError as error:
            raise ValueError(f"index: {factory!r} cannot be trained on {len(rows)} chunks ({error})") from error
    return index


def _training_rows(keys: int, lists: int) -> np.ndarray:
    """The sample that an index of so many inverted lists is trained on: it grows with them."""
    return np.sort(np.random.default_rng(0).permutation(keys)[: max(TRAINING_KEYS, KEYS_A_LIST * lists)])


def _on_device(index, device: str):
    """On a GPU where the searcher has one and FAISS can use it (faiss-gpu), with its lists in the GPU's memory; else as
    it is: a FAISS for CPUs searches there, and the exact search behind it on the GPU."""
    faiss, device = library(), torch.device(device)
    if device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return index
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device.index or 0, index)


def library():
    """The package faiss; ImportError that says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("an index needs faiss (pip install 'retro-kernels[faiss-cpu]')") from error
    return faiss
