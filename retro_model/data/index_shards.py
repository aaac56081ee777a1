"""An inverted-file index of shards, one or many: trained on a sample, filled side by side, merged on disk, searched
from a memory map.

Beside the index lie `.trained` (without vectors) and `.part-NNNNN`, one a shard, until the merged one is whole: each is
written under another name and renamed, so that a build continues with those that are missing. The lists of the merged
index are a file of their own, which is mapped and not read.
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


def form(path: Path) -> files.Form:
    return files.Form("index", (path.name, path.name + LISTS))


def fill_and_merge(trained, keys, path: Path, build: files.Build, executor: Executor | None) -> None:
    """Adds all keys to an empty trained index: `path` and its lists are then files of the build.

    Args:
        trained: makes the trained index (an IVF, with or without transforms before it); not called where it is on disk
            already.
        keys: `shards.Joined`, one part a shard.
    """
    empty = path.with_name(path.name + ".trained")
    if not empty.exists():
        _write(trained(), empty)
    parts = [path.with_name(f"{path.name}.part-{s:05d}") for s in range(len(keys.parts))]
    each(_fill, [(empty, part, keys.parts[s], int(keys.starts[s])) for s, part in enumerate(parts)], executor)
    index = _read(empty)
    lists = path.with_name(path.name + LISTS + ".new")
    disk.remove(lists)
    _merge(index, parts, lists, path.name + LISTS)
    _write(index, path.with_name(path.name + ".whole"))
    build.adopt(path.name + LISTS, lists)
    build.adopt(path.name, path.with_name(path.name + ".whole"))
    del index
    for left in (*parts, empty):
        disk.remove(left)


def mergeable(index) -> bool:
    """Whether the lists of an empty index can be merged on disk: of an IVF with nothing behind it, but not of one with
    lists of blocks (fast scan). Transforms may stand before it."""
    import faiss

    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    lists = getattr(inner, "invlists", None)
    return isinstance(inner, faiss.IndexIVF) and isinstance(
        faiss.downcast_InvertedLists(lists), faiss.ArrayInvertedLists
    )


def in_one_file(path: Path) -> bool:
    """Whether the index at `path` keeps its lists in its own file, as early versions wrote it."""
    manifest = path.with_name(path.name + ".json")
    try:
        return disk.read_json(disk.read_plain(manifest))["files"].keys() == {path.name}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def opened(path: Path):
    """Open the index with its lists memory-mapped."""
    import faiss

    index = faiss.read_index(str(path), faiss.IO_FLAG_SKIP_IVF_DATA)
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.filename, lists.read_only = str(path.with_name(path.name + LISTS)), True  # beside it, wherever that is now
    lists.do_mmap()
    return index


def _read(path: Path, flags: int = 0):
    """To be added to or merged, not searched: without the table that a search by PQ wants, lists * codes * 1 kB."""
    import faiss

    return faiss.read_index(str(path), flags | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)


def _write(index, path: Path) -> None:
    import faiss

    fresh = path.with_name(path.name + ".new")
    disk.remove(fresh)
    faiss.write_index(index, str(fresh))
    disk.sync(fresh)
    fresh.replace(path)


def _fill(empty: Path, part: Path, keys: np.ndarray, first: int) -> None:
    """The index of one shard's keys, numbered from `first`."""
    if part.exists():
        return
    with disk.Lock(part.with_name(f".{part.name}.lock"), f"{part} is being filled"):
        index = _read(empty)
        for start in range(0, len(keys), KEYS_AT_ONCE):
            block = np.array(keys[start : start + KEYS_AT_ONCE], np.float32)
            index.add_with_ids(block, np.arange(first + start, first + start + len(block)))
        _write(index, part)


def _merge(index, parts: list[Path], lists: Path, name: str) -> None:
    """Puts the lists of all parts into one file, in the order of the shards, without reading any part whole.

    name: under which the index will look for the lists, in its own folder, wherever that is.
    """
    import faiss

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
