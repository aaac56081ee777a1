"""Neighbours of every chunk of a store, computed once: neighbours.npy int64 [num_chunks, K] and its manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import files
from .database import ChunkDatabase, npy_header
from .store import TokenStore

FILE, MANIFEST, KIND = "neighbours.npy", "neighbours.json", "neighbours"


def precompute_neighbours(
    folder: str | Path, store: TokenStore, database: ChunkDatabase, k: int, *, block: int = 1024, progress: bool = False
) -> np.ndarray:
    """Searches the database for every chunk of a store, without the chunk's own document; continues after a kill.

    A document is its own by (group, name) in the database's store; by number, where that is the same store.

    Args:
        folder: gets the two files.
        store: the data; its chunks are the queries.
        database: searched.
        k: neighbours a chunk.
        block: chunks between two points where a killed run continues.
        progress: show a bar (rich).

    Returns:
        int64 [num_chunks,k], memory-mapped; -1 where fewer than k chunks lie outside the document.

    Raises:
        ValueError: chunk lengths or tokenizers that differ, k above the database's chunks, other neighbours in the folder.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.3.
    """
    for what in ("chunk_len", "tokenizer_name"):
        if getattr(store, what) != getattr(database.store, what):
            raise ValueError(
                f"{what}: expected the database's {getattr(database.store, what)!r}; got {getattr(store, what)!r} in the store"
            )
    if not 1 <= k <= len(database):
        raise ValueError(f"k: expected from 1 to the database's {len(database)} chunks; got {k}")
    exclude = _own_documents(store, database.store)[store.chunk_doc]
    settings = {"store": store.identity, "database": database.identity, "k": k, "block": block}
    header = npy_header((len(store), k), np.int64)
    with files.Build(Path(folder) / MANIFEST, KIND, settings, {FILE: header}) as build:
        if not build.complete:
            for start in files.track(range(build.facts.get("chunks", 0), len(store), block), "neighbours", enabled=progress):
                rows = slice(start, start + block)
                chunks = store.chunks(np.arange(len(store))[rows])
                build.append(FILE, database.search(chunks, k, lengths=store.lengths[rows], exclude_doc=exclude[rows]))
                build.commit(chunks=min(start + block, len(store)))
            build.finish(chunks=len(store))
    return open_neighbours(folder, store, database)


def open_neighbours(folder: str | Path, store: TokenStore, database: ChunkDatabase) -> np.ndarray:
    """What `precompute_neighbours` wrote for this store and database: checksums, and that they are the same, are verified.

    Returns:
        int64 [num_chunks,K], memory-mapped, read-only.

    Raises:
        FileNotFoundError, ValueError: naming the file, or what is another.
    """
    path = Path(folder) / MANIFEST
    manifest = files.read_manifest(path, KIND, complete=True)
    wanted = manifest["settings"] | {"store": store.identity, "database": database.identity}
    files.same_settings(path, wanted, manifest["settings"])
    files.check_files(path, manifest["files"], verify=True)
    return np.load(path.with_name(FILE), mmap_mode="r" if len(store) else None)


def _own_documents(store: TokenStore, database: TokenStore) -> np.ndarray:
    """The database's number of each of the store's documents, -1 where it has none."""
    if store.identity == database.identity:
        return np.arange(len(store.documents))
    numbers = {}
    for number, entry in enumerate(database.documents):
        if numbers.setdefault((entry.group, entry.name), number) != number:
            raise ValueError(f"database: two documents {entry.name!r} in group {entry.group!r}; which one is the store's own?")
    return np.array([numbers.get((entry.group, entry.name), -1) for entry in store.documents], np.int64)
