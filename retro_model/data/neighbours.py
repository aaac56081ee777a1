"""Neighbours of every chunk of a store, computed once: neighbours.npy int64 [num_chunks, K] and its manifest."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from . import building, files, shards
from .database import ChunkDatabase
from .store import TokenStore

FILE, MANIFEST = "neighbours.npy", "neighbours.json"
FORM = files.Form("neighbours", (FILE,), ("chunks",))


def precompute_neighbours(
    folder: str | Path,
    store: TokenStore,
    database: ChunkDatabase,
    k: int,
    *,
    block: int = 1024,
    executor: Executor | None = None,
) -> np.ndarray:
    """Search the database for every chunk of a store, outside the chunk's own document. Continues after a kill.

    `ChunkDatabase.documents_of` says which document of the database is a chunk's own. A training window may hold
    several documents, and `training.batches` drops neighbours from all of them: ask for a few more than you will use.

    Args:
        folder: output folder.
        store: its chunks are the queries; the neighbours get its shards. The database's store is not embedded again.
        database: the database to search.
        k: neighbours per chunk.
        block: chunks between two commits; a killed run continues from the last commit.
        executor: runs the shards, see `building`; None: this process.

    Returns: int64 [num_chunks,k], memory-mapped; -1 if fewer than k chunks lie outside the document.
    Raises: ValueError: chunk lengths or tokenizers differ; k exceeds the database's chunks; the folder has others.
    Source: Borgeaud et al., arXiv 2112.04426, section 2.3.
    """
    for what in ("chunk_len", "tokenizer_name"):
        got, want = getattr(store, what), getattr(database.store, what)
        if got != want:
            raise ValueError(f"{what}: expected the database's {want!r}; got {got!r} in the store")
    if not 1 <= k <= len(database):
        raise ValueError(f"k: expected from 1 to the database's {len(database)} chunks; got {k}")
    folder, documents = Path(folder), database.documents_of(store)
    if isinstance(store, shards.ShardedStore):
        own = np.split(documents, store.first_documents[1:])
        calls = [(part, database, numbers, k, block) for part, numbers in zip(store.shards, own)]
        building.build_shards(folder, FORM.kind, MANIFEST, _search, calls, executor)
    else:
        _search(folder, store, database, documents, k, block)
    return open_neighbours(folder, store, database)


def _search(
    folder: Path, store: TokenStore, database: ChunkDatabase, documents: np.ndarray, k: int, block: int
) -> None:
    """Write the neighbours of one shard's chunks. documents: `database.documents_of` the shard."""
    settings = {"store": store.identity, "database": database.identity, "k": k, "block": block}
    header = files.npy_header((len(store), k), np.int64)
    with files.Build(folder / MANIFEST, FORM, settings, {FILE: header}) as build:
        if not build.complete:
            for start in range(build.facts.get("chunks", 0), len(store), block):
                rows = np.arange(start, min(start + block, len(store)))
                build.append(FILE, database.search_rows(store, rows, k, exclude_doc=documents[store.chunk_doc[rows]]))
                build.commit(chunks=start + len(rows))
            build.finish(chunks=len(store))


def open_neighbours(folder: str | Path, store: TokenStore, database: ChunkDatabase) -> np.ndarray:
    """Open the output of `precompute_neighbours`. Verify its checksums, its store and its database.

    Returns: int64 [num_chunks,K], memory-mapped, read-only.
    Raises: FileNotFoundError, ValueError naming the file or the setting that differs.
    """
    parts = shards.parts_of(Path(folder), FORM.kind, MANIFEST, store)
    return shards.joined([_open(part, shard, database) for part, shard in parts])


def _open(folder: Path, store: TokenStore, database: ChunkDatabase) -> np.ndarray:
    """Open one shard's neighbours, memory-mapped."""
    path = folder / MANIFEST
    manifest = files.read_manifest(path, FORM, complete=True)
    settings = manifest["settings"]
    files.same_settings(path, settings | {"store": store.identity, "database": database.identity}, settings)
    files.check_files(path, manifest, verify=True)
    return files.mapped_npy(folder / FILE, np.int64, (len(store), settings.get("k")))
