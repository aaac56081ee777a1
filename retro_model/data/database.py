"""ChunkDatabase: a token store, the embeddings of its chunks and a searcher. Keys N, values [N, F]."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch

from . import building, files, shards
from .arrays import of_rows, row_lengths, within
from .embed import Embedder
from .faiss_index import FaissSearcher
from .search import DenseSearcher
from .store import TokenStore

MANIFEST, KEYS = "database.json", "keys.npy"
KEY_TYPES = ("float32", "float16")  # a manifest names the type only if it is not the first
FORM = files.Form("chunk database", (KEYS,), ("chunks",))


class ChunkDatabase:
    """Database of chunks: `search` returns ids of neighbours, `values` their tokens [N, F].

        database = ChunkDatabase.build(folder, store, HashedTfidf().fit(store))
        ids = database.search(chunks, k=2)  # [n,2]
        neighbours, mask = database.values(ids)  # [n,2,2M]

    Arguments and results are NumPy arrays or torch tensors alike, so `generate(retrieve=)` takes
    `lambda chunks: database.values(database.search(chunks, k=2))`.

    Args:
        store: its chunks are the values.
        searcher: finds chunks.

    Attributes:
        passage_chunks: P, chunks that `values` returns for each neighbour: the chunk found and the next ones of its
            document. May be set; the paper has 2.
    """

    passage_chunks = 2

    def __init__(self, store: TokenStore, searcher: DenseSearcher) -> None:
        self.store, self.searcher = store, searcher
        self.identity = f"{store.identity} {searcher.name}"
        self._documents_of: dict[str, np.ndarray] = {}
        self._again: Callable[[], ChunkDatabase] | None = None

    @classmethod
    def build(
        cls,
        folder: str | Path,
        store: TokenStore,
        embedder: Embedder,
        *,
        block: int = 4096,
        key_type: str = "float32",
        executor: Executor | None = None,
        **options,
    ) -> ChunkDatabase:
        """Embed a store's chunks into `folder` and open the result. After a kill, the same call continues.

        Args:
            store: its chunks are embedded. The keys get the same shards.
            block: chunks between two commits; a killed run continues from the last commit.
            key_type: "float16" takes half the disk space; distances are computed in float32.
            executor: embeds shards, fills the index, see `building`; None: this process. It pickles the embedder.
            options: `index`, `nprobe` and `device` of `open`.

        Raises: ValueError: the folder holds a database of another store or embedder, or a corrupt file.
        """
        if key_type not in KEY_TYPES:
            raise ValueError(f"key_type: expected one of {', '.join(KEY_TYPES)}; got {key_type!r}")
        folder = Path(folder)
        if isinstance(store, shards.ShardedStore):
            calls = [(part, embedder, block, key_type) for part in store.shards]
            building.build_shards(folder, FORM.kind, MANIFEST, _embed, calls, executor)
        else:
            _embed(folder, store, embedder, block, key_type)
        return cls.open(folder, store, embedder, verify=False, executor=executor, **options)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        store: TokenStore,
        embedder: Embedder,
        *,
        index: str | None = None,
        nprobe: int = 16,
        device: str = "cpu",
        verify: bool = True,
        executor: Executor | None = None,
    ) -> ChunkDatabase:
        """Open the output of `build`, memory-mapped. Store and embedder must be the same.

        Args:
            index: FAISS index factory string; None: exact search.
            nprobe: lists that an IVF index visits.
            device: device of the search. On "cuda" the index is searched there only with a FAISS for GPUs.
            verify: compare checksums.
            executor: fills the index; None: this process.

        Raises: FileNotFoundError, ValueError naming the file or the setting that differs.
        """
        folder = Path(folder)
        parts = shards.parts_of(folder, FORM.kind, MANIFEST, store)
        keys, checksums = zip(*(_keys(part, shard, embedder, verify) for part, shard in parts))
        searched = embedder, shards.joined(keys), store.chunk_doc
        if index is None:
            searcher = DenseSearcher(*searched, device=device)
        else:
            name = "".join(c if c.isalnum() else "-" for c in index)
            crc = checksums[0] if len(parts) == 1 else zlib.crc32(repr(list(checksums)).encode())
            path = folder / f"{name}-{crc:08x}.faiss"  # one index for these keys
            how = {"device": device, "nprobe": nprobe, "verify": verify, "executor": executor}
            searcher = FaissSearcher(*searched, index, path, **how)
        made, options = cls(store, searcher), {"index": index, "nprobe": nprobe, "device": device}
        made._again = functools.partial(cls.open, folder, store, embedder, verify=False, **options)
        return made

    def __reduce__(self):
        """Pickle as a call that opens the same files again."""
        if self._again is None:
            raise TypeError("database: expected one made by `open` or `build`: others cannot be pickled")
        return self._again, (), {"passage_chunks": self.passage_chunks}

    def __len__(self) -> int:
        return len(self.store)

    @property
    def chunk_len(self) -> int:
        return self.store.chunk_len

    @property
    def recall(self) -> dict[int, float] | None:
        """{k: recall@k of the index against exact search}, measured when first asked for; None for exact search."""
        return getattr(self.searcher, "recall", None)

    def documents_of(self, store: TokenStore) -> np.ndarray:
        """Return the number in this database of each of a store's documents, int64 [documents]; -1 if it is absent.

        Documents are matched by (group, name); by number if the store is the database's own.

        Raises: ValueError: the database has two documents of one group and name.
        """
        if store.identity == self.store.identity:
            return np.arange(len(store.documents))
        if store.identity not in self._documents_of:
            numbers: dict[tuple[str, str], int] = {}
            for number, entry in enumerate(self.store.documents):
                if numbers.setdefault((entry.group, entry.name), number) != number:
                    twice = f"two documents {entry.name!r} in group {entry.group!r}"
                    raise ValueError(f"database: expected documents of different group and name; got {twice}")
            found = [numbers.get((entry.group, entry.name), -1) for entry in store.documents]
            self._documents_of[store.identity] = np.array(found, np.int64)
        return self._documents_of[store.identity]

    def document_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each chunk's document, int64 [...]; -1 for the id -1."""
        ids = np.asarray(ids)
        return np.where(ids < 0, -1, self.store.chunk_doc[np.maximum(ids, 0)]) if len(self) else np.full(ids.shape, -1)

    def search(self, chunks, k: int, *, lengths=None, exclude_doc=None):
        """Return the k nearest chunks of each chunk, outside the excluded document.

        Args:
            chunks: token ids [n,M].
            k: neighbours, at most the number of chunks.
            lengths: real tokens of each chunk [n]; None: M.
            exclude_doc: document number in this database's store [n], -1: none; None: no exclusion.

        Returns: int64 [n,k], nearest first; -1 only if fewer than k chunks lie outside the document.
        Raises: TypeError, ValueError naming the argument.
        """
        if isinstance(chunks, torch.Tensor):
            found = self.search(_numpy(chunks), k, lengths=_numpy(lengths), exclude_doc=_numpy(exclude_doc))
            return torch.from_numpy(found).to(chunks.device)
        chunks = within("chunks", chunks, 0, self.store.vocab_size - 1, "token ids", dims=2).astype(np.int64)
        n, width = chunks.shape
        if width != self.chunk_len:
            raise ValueError(f"chunks: expected [n,M] with M={self.chunk_len}; got {list(chunks.shape)}")
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= len(self):
            raise ValueError(f"k: expected from 1 to the database's {len(self)} chunks; got {k!r}")
        lengths = row_lengths("lengths", lengths, n, width)
        if exclude_doc is not None:
            exclude_doc = of_rows("exclude_doc", exclude_doc, n, -1, len(self.store.documents) - 1)
        return self.searcher.nearest(self.searcher.embedder(chunks, lengths), int(k), exclude_doc)

    def search_rows(
        self, store: TokenStore, rows: np.ndarray, k: int, *, exclude_doc: np.ndarray | None = None
    ) -> np.ndarray:
        """`search` for chunks of a store by their rows [n]. The database's own chunks are not embedded again."""
        first_rows = {self.store.identity: 0}
        if isinstance(self.store, shards.ShardedStore):
            first_rows |= {shard.identity: first for shard, first in zip(self.store.shards, self.store.tokens.starts)}
        if store.identity not in first_rows:
            return self.search(store.chunks(rows), k, lengths=store.lengths[rows], exclude_doc=exclude_doc)
        at = first_rows[store.identity] + np.asarray(rows)
        return self.searcher.nearest(np.array(self.searcher.keys[at], np.float32), k, exclude_doc)

    def similarity(self, store: TokenStore, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the similarity of a store's chunks to their neighbours `ids` [n,k], see `DenseSearcher.similarity`."""
        return self.searcher.similarity(self.searcher.embedder(store.chunks(rows), store.lengths[rows]), ids)

    def values(self, ids):
        """Return the tokens of each chunk and of the next chunks of its document.

        Args:
            ids: chunk numbers [...]; -1: no chunk.

        Returns: tokens int64 [...,PM], mask bool [...,PM]; 0 and False past the document's end and for the id -1.

        Raises: TypeError, ValueError: ids out of range.
        """
        if isinstance(ids, torch.Tensor):
            return tuple(torch.from_numpy(part).to(ids.device) for part in self.values(_numpy(ids)))
        count, m, parts = len(self), self.chunk_len, self.passage_chunks
        ids = within("ids", ids, -1, count - 1).astype(np.int64)
        tokens, mask = np.zeros((*ids.shape, parts, m), np.int64), np.zeros((*ids.shape, parts, m), bool)
        for part in range(parts if count else 0):
            first = np.maximum(ids, 0)
            at = np.minimum(first + part, count - 1)
            there = (ids >= 0) & (first + part < count) & (self.store.chunk_doc[at] == self.store.chunk_doc[first])
            mask[..., part, :] = there[..., None] & (np.arange(m) < self.store.lengths[at][..., None])
            tokens[..., part, :] = np.where(mask[..., part, :], self.store.tokens[at], 0)
        return tokens.reshape(*ids.shape, parts * m), mask.reshape(*ids.shape, parts * m)


def _embed(folder: Path, store: TokenStore, embedder: Embedder, block: int, key_type: str) -> None:
    """Embed the chunks of one shard into `folder`."""
    settings = {"store": store.identity, "embedder": embedder.name, "dim": embedder.dim, "block": block}
    if key_type != KEY_TYPES[0]:
        settings["key_type"] = key_type
    header = files.npy_header((len(store), embedder.dim), key_type)
    with files.Build(folder / MANIFEST, FORM, settings, {KEYS: header}) as build:
        if not build.complete:
            done = build.facts.get("chunks", 0)
            for start in range(done, len(store), block):
                rows = np.arange(start, min(start + block, len(store)))
                keys = embedder(store.chunks(rows), store.lengths[rows])
                if keys.dtype != np.float32 or keys.shape != (len(rows), embedder.dim):
                    want, got = f"float32 [{len(rows)},{embedder.dim}]", f"{keys.dtype} {list(keys.shape)}"
                    raise ValueError(f"{embedder.name}: expected {want}; got {got}")
                if not np.isfinite(keys).all():
                    raise ValueError(f"{embedder.name}: expected finite embeddings; got NaN or infinity")
                build.append(KEYS, keys.astype(key_type))
                build.commit(chunks=start + len(rows))
            build.finish(chunks=len(store))


def _keys(folder: Path, store: TokenStore, embedder: Embedder, verify: bool) -> tuple[np.ndarray, int]:
    """Open one shard's keys, memory-mapped. Return them and their checksum."""
    manifest = files.read_manifest(folder / MANIFEST, FORM, complete=True)
    settings = manifest["settings"]
    wanted = settings | {"store": store.identity, "embedder": embedder.name, "dim": embedder.dim}
    files.same_settings(folder / MANIFEST, wanted, settings)
    files.check_files(folder / MANIFEST, manifest, verify=verify)
    key_type = settings.get("key_type", KEY_TYPES[0])
    keys = files.mapped_npy(folder / KEYS, key_type, (len(store), embedder.dim))
    return keys, manifest["files"][KEYS]["crc32"]


def _numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
