"""Neighbours of every chunk of a store, computed once: neighbours.npy int64 [num_chunks, K] and its manifest."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base.progress import track

from . import files, shards
from .database import ChunkDatabase
from .executors import each
from .store import TokenStore

FILE, MANIFEST = "neighbours.npy", "neighbours.json"
FORM = files.Form(
    "neighbours",
    (FILE,),
    ("chunks",),
    lambda settings, facts: {FILE: len(files.npy_header((0, 0), np.int64)) + facts["chunks"] * settings["k"] * 8},
)
ROWS_AT_ONCE = 1 << 16  # whose ids are checked


def precompute_neighbours(
    folder: str | Path,
    store: TokenStore,
    database: ChunkDatabase,
    k: int,
    *,
    block: int = 1024,
    executor: Executor | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Searches the database for every chunk of a store, without the chunk's own document; continues after a kill.

    What is its own document: see `ChunkDatabase.documents_of`. A training window may hold several documents:
    `training.batches` leaves out the neighbours from any of them, so ask for a few more here than it is to use.

    Args:
        folder: gets the two files.
        store: the data; its chunks are the queries; where it has many shards, so have the neighbours. Where it is the
            database's own, they are not embedded again.
        database: searched.
        k: neighbours a chunk.
        block: chunks between two points where a killed run continues.
        executor: searches for the shards, see `executors`; None: here.
        progress: show a bar (rich).

    Returns:
        int64 [num_chunks,k], memory-mapped; -1 where fewer than k chunks lie outside the document.

    Raises:
        ValueError: chunk lengths or tokenizers that differ, k above the database's chunks, other neighbours in the
            folder.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.3.
    """
    for what in ("chunk_len", "tokenizer_name"):
        if getattr(store, what) != getattr(database.store, what):
            raise ValueError(
                f"{what}: expected the database's {getattr(database.store, what)!r}; got {getattr(store, what)!r} in "
                "the store"
            )
    if not 1 <= k <= len(database):
        raise ValueError(f"k: expected from 1 to the database's {len(database)} chunks; got {k}")
    folder = Path(folder)
    if not isinstance(store, shards.ShardedStore):
        _search(folder, store, database, database.documents_of(store), k, block, progress)
        return open_neighbours(folder, store, database)
    ends = [*store.first_documents[1:], len(store.documents)]
    documents = [database.documents_of(store)[first:end] for first, end in zip(store.first_documents, ends)]
    with shards.building(folder, FORM.kind):
        parts = zip(store.shards, documents)
        each(
            _search,
            [(folder / shards.name_of(s), part, database, own, k, block, False) for s, (part, own) in enumerate(parts)],
            executor,
        )
        shards.write_manifest(folder, FORM.kind, MANIFEST, len(store.shards))
    return open_neighbours(folder, store, database)


def _search(
    folder: Path, store: TokenStore, database: ChunkDatabase, documents: np.ndarray, k: int, block: int, progress: bool
) -> None:
    """The neighbours of one shard's chunks. documents: the database's number of each of the shard's own, -1 for
    none."""
    settings = {"store": store.identity, "database": database.identity, "k": k, "block": block}
    header = files.npy_header((len(store), k), np.int64)
    with files.Build(folder / MANIFEST, FORM, settings, {FILE: header}) as build:
        if not build.complete:
            for start in track(range(build.facts.get("chunks", 0), len(store), block), "neighbours", enabled=progress):
                rows = np.arange(start, min(start + block, len(store)))
                build.append(FILE, database.search_rows(store, rows, k, exclude_doc=documents[store.chunk_doc[rows]]))
                build.commit(chunks=start + len(rows))
            build.finish(chunks=len(store))


def open_neighbours(folder: str | Path, store: TokenStore, database: ChunkDatabase) -> np.ndarray:
    """Open the output of `precompute_neighbours`; verifies its checksums, and that store and database are those it was
    made from.

    Returns:
        int64 [num_chunks,K], memory-mapped, read-only.

    Raises:
        FileNotFoundError, ValueError: naming the file, or what is another.
    """
    parts, stores = shards.folders(Path(folder), FORM.kind, MANIFEST), shards.shards_of(store)
    if len(parts) != len(stores):
        raise ValueError(f"{folder}: expected the {len(stores)} shards of the store; got {len(parts)}")
    opened = [_open(part, of, database) for part, of in zip(parts, stores)]
    return opened[0] if len(opened) == 1 else shards.Joined(opened)


def _open(folder: Path, store: TokenStore, database: ChunkDatabase) -> np.ndarray:
    """One shard's neighbours, memory-mapped."""
    path = folder / MANIFEST
    manifest = files.read_manifest(path, FORM, complete=True)
    wanted = manifest["settings"] | {"store": store.identity, "database": database.identity}
    files.same_settings(path, wanted, manifest["settings"])
    k = wanted.get("k")
    if type(k) is not int or not 1 <= k <= len(database):
        raise ValueError(f"{path}: expected k from 1 to the database's {len(database)} chunks; got {k!r}")
    files.check_files(path, FORM, manifest, verify=True, chunks=len(store))
    ids = files.mapped_npy(path.with_name(FILE), np.int64, (len(store), k))
    for start in range(0, len(ids), ROWS_AT_ONCE):
        part = ids[start : start + ROWS_AT_ONCE]
        if part.min() < -1 or part.max() >= len(database):
            raise ValueError(
                f"{path.with_name(FILE)}: expected ids within -1 .. {len(database) - 1}; got {part.min()} .. "
                f"{part.max()}"
            )
    return ids
