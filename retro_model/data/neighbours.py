"""Neighbours of every chunk of a store, computed once: neighbours.npy int64 [num_chunks, K] and its manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import files
from .database import ChunkDatabase
from .store import TokenStore

FILE, MANIFEST = "neighbours.npy", "neighbours.json"
FORM = files.Form(
    "neighbours", (FILE,), ("chunks",), lambda settings, facts: {FILE: len(files.npy_header((0, 0), np.int64)) + facts["chunks"] * settings["k"] * 8}
)  # fmt: skip
ROWS_AT_ONCE = 1 << 16  # whose ids are checked


def precompute_neighbours(
    folder: str | Path, store: TokenStore, database: ChunkDatabase, k: int, *, block: int = 1024, progress: bool = False
) -> np.ndarray:
    """Searches the database for every chunk of a store, without the chunk's own document; continues after a kill.

    What is its own document: see `ChunkDatabase.documents_of`. A training window may hold several documents: `training.batches` leaves
    out the neighbours from any of them, so ask for a few more here than it is to use.

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
    exclude = database.documents_of(store)[store.chunk_doc]
    settings = {"store": store.identity, "database": database.identity, "k": k, "block": block}
    header = files.npy_header((len(store), k), np.int64)
    with files.Build(Path(folder) / MANIFEST, FORM, settings, {FILE: header}) as build:
        if not build.complete:
            for start in files.track(range(build.facts.get("chunks", 0), len(store), block), "neighbours", enabled=progress):
                rows = np.arange(start, min(start + block, len(store)))
                build.append(FILE, database.search(store.chunks(rows), k, lengths=store.lengths[rows], exclude_doc=exclude[rows]))
                build.commit(chunks=start + len(rows))
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
    manifest = files.read_manifest(path, FORM, complete=True)
    wanted = manifest["settings"] | {"store": store.identity, "database": database.identity}
    files.same_settings(path, wanted, manifest["settings"])
    k = wanted.get("k")
    if type(k) is not int or not 1 <= k <= len(database):
        raise ValueError(f"{path}: expected k from 1 to the database's {len(database)} chunks; got {k!r}")
    files.check_files(path, FORM, manifest, verify=True, chunks=len(store))
    found = files.mapped_npy(path.with_name(FILE), np.int64, (len(store), k))
    for start in range(0, len(found), ROWS_AT_ONCE):
        part = found[start : start + ROWS_AT_ONCE]
        if part.min() < -1 or part.max() >= len(database):
            raise ValueError(f"{path.with_name(FILE)}: expected ids within -1 .. {len(database) - 1}; got {part.min()} .. {part.max()}")
    return found
