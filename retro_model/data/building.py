"""Builds of many shards: executors, folders of shards, and an inverted-file index that is merged on disk.

An executor is any `concurrent.futures.Executor`: a ProcessPoolExecutor (`pool`), Dask's
`Client(...).get_executor(retries=3)`, mpi4py's MPIPoolExecutor. A task is a module-level function whose arguments can
be pickled. Stores and databases are pickled as the names of their folders, so workers need the same file system. A task
may run twice: the second run finds the shard finished.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from pathlib import Path

import numpy as np

from retro_model.base import disk

from . import files, shards, store

KEYS_AT_ONCE = 1 << 16
LISTS = ".lists"


def pool(workers: int) -> ProcessPoolExecutor:
    """Return an executor of processes on this machine, one thread each."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start)


def _start() -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def each(task: Callable, arguments: Iterable[tuple], executor: Executor | None = None) -> list:
    """Return task(*a) for each a, in order. executor None: in this process, one after the other.

    Raises:
        The exception of the first task that failed, in this order; RuntimeError if the executor broke. Tasks that have
        not begun are cancelled, and finished shards are kept.
    """
    columns = list(zip(*arguments))
    try:
        return list((executor or builtins).map(task, *columns)) if columns else []
    except BrokenExecutor as error:
        advice = "run the same call again: finished shards are kept"
        raise RuntimeError(f"a process of the pool died ({error}); {advice}") from error


def build_shards(
    folder: Path, kind: str, inner: str, task: Callable, arguments: Sequence[tuple], executor: Executor | None
) -> None:
    """Run task(shard's folder, *arguments) for each shard, then write `shards.json`. A second build is refused at once.

    inner: file name of the shards' own manifests, whose digests go into `shards.json`.
    """
    disk.make_folder(folder)
    with disk.Lock(folder / f".{shards.MANIFEST}.lock", f"{folder}: the {kind} is being built"):
        names = [shards.name_of(s) for s in range(len(arguments))]
        each(task, [(folder / name, *rest) for name, rest in zip(names, arguments)], executor)
        entries = [{"name": name, "sha256": disk.sha256_of(folder / name / inner)} for name in names]
        disk.write_json(folder / shards.MANIFEST, {"kind": kind, "version": shards.VERSION, "shards": entries})


def build_sharded_store(
    folder: str | Path,
    sources: Sequence[Iterable | Callable],
    tokenizer,
    *,
    executor: Executor | None = None,
    **options,
) -> shards.ShardedStore:
    """Build a store whose shard s holds the documents of sources[s]. Run again after a kill, it continues.

        sources = [functools.partial(read_texts, [path]) for path in find_texts(["rows/*.jsonl"])]
        with Client("scheduler:8786") as client:
            store = build_sharded_store("store", sources, tokenizer, executor=client.get_executor(retries=3))

    folder: output folder, with one folder per shard and `shards.json`.
    sources: documents as `build_store` takes them, or functions without arguments that return them; picklable.
    tokenizer, options: as in `build_store`.
    executor: runs the shards, see `each`; None: this process.
    Raises: as `build_store`; retro_model.base.disk.Busy if another process builds the folder.
    """
    folder = Path(folder)
    if not len(sources):
        raise ValueError("sources: expected one per shard, at least one; got none")
    calls = [(source, tokenizer, options) for source in sources]
    build_shards(folder, store.FORM.kind, store.MANIFEST, _store_shard, calls, executor)
    return shards.ShardedStore(folder, verify=False)


def _store_shard(folder: Path, source, tokenizer, options: dict) -> None:
    store.build_store(folder, source() if callable(source) else source, tokenizer, **options, allow_empty=True)


def library():
    """Import faiss. Raise ImportError that says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("an index needs faiss (pip install 'retro-kernels[faiss-cpu]')") from error
    return faiss


def fill_and_merge(trained, keys, path: Path, build: files.Build, executor: Executor | None) -> None:
    """Add all keys to a trained index; put `path` and its lists into the build.

    trained: makes the trained index: an IVF, or transforms and an IVF. Called only if none is on disk.
    keys: `shards.Joined` with one part per shard.
    """
    parts = path.with_name(path.name + ".parts")
    disk.make_folder(parts)
    empty = parts / "trained"
    if not empty.exists():
        written(trained(), empty)
    filled = [parts / shards.name_of(s) for s in range(len(keys.parts))]
    each(_fill, [(empty, part, keys.parts[s], int(keys.starts[s])) for s, part in enumerate(filled)], executor)
    index, lists = _read(empty), parts / "lists"
    _merge(index, filled, lists, path.name + LISTS)
    whole = written(index, parts / "whole")
    build.adopt(path.name + LISTS, lists)
    build.adopt(path.name, whole)
    del index
    disk.remove(parts)


def mergeable(index) -> bool:
    """Whether the lists of an empty index can be merged on disk.

    The index must be an IVF, or transforms and an IVF, without a refinement and without fast-scan codes.
    """
    faiss = library()
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if not isinstance(inner, faiss.IndexIVF):
        return False
    return isinstance(faiss.downcast_InvertedLists(inner.invlists), faiss.ArrayInvertedLists)


def _read(path: Path, flags: int = 0):
    """Read an index to add to or merge, without the table that only a PQ search needs (lists * codes * 1 kB)."""
    return library().read_index(str(path), flags | library().IO_FLAG_SKIP_PRECOMPUTE_TABLE)


def written(index, path: Path) -> Path:
    """Write an index under another name, then rename it; return its path."""
    fresh = path.with_name(path.name + ".new")
    disk.remove(fresh)
    library().write_index(index, str(fresh))
    disk.sync(fresh)
    return fresh.replace(path)


def _fill(empty: Path, part: Path, keys: np.ndarray, first: int) -> None:
    """Write the index of one shard's keys, numbered from `first`."""
    if part.exists():
        return
    with disk.Lock(part.with_name(f".{part.name}.lock"), f"{part} is being filled"):
        index = _read(empty)
        for start in range(0, len(keys), KEYS_AT_ONCE):
            block = np.array(keys[start : start + KEYS_AT_ONCE], np.float32)
            index.add_with_ids(block, np.arange(first + start, first + start + len(block)))
        written(index, part)


def _merge(index, parts: list[Path], lists: Path, name: str) -> None:
    """Merge the lists of all parts into one file, in the order of the shards, without reading any part whole.

    name: file name of the lists in the index's own folder.
    """
    faiss = library()
    inverted = faiss.extract_index_ivf(index)
    opened_parts = [_read(part, faiss.IO_FLAG_MMAP) for part in parts]
    sources = faiss.InvertedListsPtrVector()
    for part in opened_parts:
        sources.push_back(faiss.extract_index_ivf(part).invlists)
    merged = faiss.OnDiskInvertedLists(inverted.nlist, inverted.code_size, str(lists))
    index.ntotal = inverted.ntotal = merged.merge_from_multiple(sources.data(), sources.size(), False)
    merged.filename = name
    inverted.replace_invlists(merged, True)
    merged.this.disown()
