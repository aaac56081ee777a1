"""Inverted-file index of one or more shards: trained on a sample, filled in parallel, merged on disk, memory-mapped.

While it is built, `.trained` (without vectors) and one `.part-NNNNN` a shard lie beside the index. Each is written
under another name and renamed, so a build that was killed makes only the missing ones. The lists of the merged index
are in a file of their own, which is mapped.
"""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base import disk

from . import files
from .executors import each

KEYS_AT_ONCE = 1 << 16
LISTS = ".lists"


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
    keys: `shards.Joined`, one part a shard.
    """
    empty = path.with_name(path.name + ".trained")
    if not empty.exists():
        written(trained(), empty)
    parts = [path.with_name(f"{path.name}.part-{s:05d}") for s in range(len(keys.parts))]
    each(_fill, [(empty, part, keys.parts[s], int(keys.starts[s])) for s, part in enumerate(parts)], executor)
    index = _read(empty)
    lists = path.with_name(path.name + LISTS + ".new")
    disk.remove(lists)
    _merge(index, parts, lists, path.name + LISTS)
    whole = written(index, path.with_name(path.name + ".whole"))
    build.adopt(path.name + LISTS, lists)
    build.adopt(path.name, whole)
    del index
    for left in (*parts, empty):
        disk.remove(left)


def mergeable(index) -> bool:
    """Whether the lists of an empty index can be merged on disk.

    The index must be an IVF, or transforms and an IVF, without a refinement and without fast-scan codes.
    """
    faiss = library()
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if not isinstance(inner, faiss.IndexIVF):
        return False
    return isinstance(faiss.downcast_InvertedLists(inner.invlists), faiss.ArrayInvertedLists)


def opened(path: Path):
    """Open the index with its lists memory-mapped."""
    faiss = library()
    index = faiss.read_index(str(path), faiss.IO_FLAG_SKIP_IVF_DATA)
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.filename, lists.read_only = str(path.with_name(path.name + LISTS)), True  # beside it, wherever that is now
    lists.do_mmap()
    return index


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
