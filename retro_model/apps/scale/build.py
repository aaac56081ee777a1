"""The stages of a build, one after another, each on all shards by an executor; what each took."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base import disk
from retro_model.data import executors
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import precompute_neighbours
from retro_model.data.shards import build_sharded_store, open_store
from retro_model.data.store import TokenStore

from .recipe import Recipe

REPORT, EMBEDDER, FITTED = "report.json", "embedder.npz", "embedder.json"


def build(
    folder: Path,
    recipe: Recipe,
    sources: Sequence,
    tokenizer,
    *,
    executor: Executor | None = None,
    searched: int | None = None,
    cluster: int = 0,
    device: str = "cpu",
    say: Callable[[str], object] = print,
) -> dict:
    """Store, keys, index and neighbours in `folder`; run again after a kill it continues.

    searched: chunks whose neighbours are searched, the first of the store, and only searched for, not kept; None: all,
    kept.
    cluster: workers of the executor where it is Dask's, for the report.
    device: where neighbours are searched, see `ChunkDatabase.build`.

    Returns: the report, which is also written: what each stage took and the recall.
    """
    stages: list[dict] = []

    def stage(name: str, work: Callable):
        say(f"{name} ...")
        start, mine = time.perf_counter(), time.process_time()
        with executors.measured() as used:
            result = work()
        # without an executor the tasks are run, and measured, here
        own = time.process_time() - mine if executor is not None else 0.0
        if executor is None:
            own = max(0.0, time.process_time() - mine - used.cpu)
        stages.append(
            {
                "name": name,
                "seconds": round(time.perf_counter() - start, 2),
                "core_seconds": round(used.cpu + own, 2),
                "of_tasks": round(used.cpu, 2),
                "peak_bytes": max(used.peak, executors.peak_bytes()),
                "tasks": used.tasks,
            }
        )
        say(
            f"  {stages[-1]['seconds']} s, {stages[-1]['core_seconds']} core-seconds, {stages[-1]['peak_bytes'] >> 20} "
            "MiB at most"
        )
        return result

    options = {"chunk_len": recipe.chunk_len, "executor": executor}
    store = stage("tokens", lambda: build_sharded_store(folder / "store", sources, tokenizer, **options))
    embedder = stage("frequencies", lambda: _fitted(folder, recipe, store, executor))
    keys = {"key_type": recipe.key_type, "executor": executor}
    stage("keys", lambda: ChunkDatabase.build(folder / "keys", store, embedder, **keys))
    index = {"index": recipe.index, "nprobe": recipe.nprobe, "device": device}
    database = stage(
        "index", lambda: ChunkDatabase.open(folder / "keys", store, embedder, **index, verify=False, executor=executor)
    )
    if searched is None:
        stage(
            "neighbours",
            lambda: precompute_neighbours(folder / "neighbours", store, database, recipe.k, executor=executor),
        )
    else:
        stage("neighbours", lambda: _search(database, searched, recipe.k, executor))
    report = {
        "recipe": dataclasses.asdict(recipe),
        "chunks": len(store),
        "tokens": store.num_tokens,
        "documents": len(store.documents),
        "shards": len(store.shards),
        "searched": len(store) if searched is None else searched,
        "cluster": cluster,
        "recall": database.recall,
        "stages": stages,
        "disk": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
    }
    disk.write_json(folder / REPORT, report)
    return report


def _fitted(folder: Path, recipe: Recipe, store: TokenStore, executor: Executor | None) -> HashedTfidf:
    """The embedder, kept in the folder with what it was fitted to: a build that continues does not count again."""
    said, wanted = folder / FITTED, {"store": store.identity, "dim": recipe.dim}
    if said.exists() and disk.read_json(said.read_bytes()) == wanted:
        return HashedTfidf.load(folder / EMBEDDER)
    embedder = HashedTfidf(recipe.dim).fit(store, executor=executor)
    embedder.save(folder / EMBEDDER)
    disk.write_json(said, wanted)
    return embedder


def _search(database: ChunkDatabase, searched: int, k: int, executor: Executor | None, block: int = 1024) -> None:
    """Searches for the first chunks, each without its document."""
    starts = range(0, searched, block)
    executors.each(_search_block, [(database, first, min(first + block, searched), k) for first in starts], executor)


def _search_block(database: ChunkDatabase, first: int, last: int, k: int) -> None:
    store, rows = database.store, np.arange(first, last)
    database.search(store.chunks(rows), k, lengths=store.lengths[rows], exclude_doc=store.chunk_doc[rows])


def opened(folder: Path):
    """(store, database, neighbours) that `build` left in a folder."""
    from retro_model.data.neighbours import open_neighbours

    recipe = Recipe(**json.loads((folder / REPORT).read_text())["recipe"])
    store = open_store(folder / "store", verify=False)
    embedder = HashedTfidf.load(folder / EMBEDDER)
    database = ChunkDatabase.open(
        folder / "keys", store, embedder, index=recipe.index, nprobe=recipe.nprobe, verify=False
    )
    return store, database, open_neighbours(folder / "neighbours", store, database)
