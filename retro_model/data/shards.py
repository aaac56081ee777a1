"""Folders of shards: each shard an ordinary folder of its kind, and one manifest, `shards.json`, written when all are
whole.

A small corpus is one shard, its folder itself: same files, same code. Documents never cross a shard. Chunks and
documents are numbered through all shards, in order.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base import disk

from . import store as one
from .executors import each
from .store import Entry, TokenStore

MANIFEST, VERSION = "shards.json", 1


def name_of(shard: int) -> str:
    return f"{shard:05d}"


def write_manifest(folder: Path, kind: str, inner: str, shards: int) -> None:
    """Write `shards.json`: the shards are whole, each named with its manifest's digest."""
    entries = [{"name": name_of(s), "sha256": _digest(folder / name_of(s) / inner)} for s in range(shards)]
    disk.write_json(folder / MANIFEST, {"kind": kind, "version": VERSION, "shards": entries})


def folders(folder: Path, kind: str, inner: str) -> list[Path]:
    """The folders of the shards; the folder itself where it is a single one.

    Raises:
        FileNotFoundError, ValueError: naming the file; a shard whose manifest is another than `shards.json` says.
    """
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        if (folder / name_of(0)).is_dir():
            raise ValueError(f"{path}: missing, the {kind} is unfinished; run the same build again and it continues")
        return [folder]
    try:
        listing = disk.read_json(disk.read_plain(path))
        if (listing["kind"], listing["version"]) != (kind, VERSION):
            raise ValueError(
                f"expected a {kind} of version {VERSION}; got a {listing['kind']} of version {listing['version']}"
            )
        wanted = {entry["name"]: entry["sha256"] for entry in listing["shards"]}
        if list(wanted) != [name_of(s) for s in range(len(wanted))] or not wanted:
            raise ValueError("its shards are not numbered from 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: corrupt ({error})") from None
    for name, digest in wanted.items():
        if _digest(folder / name / inner) != digest:
            raise ValueError(
                f"{folder / name / inner}: another shard than {MANIFEST} names; build again, or bring the folder back "
                "whole"
            )
    return [folder / name for name in wanted]


def _digest(path: Path) -> str:
    try:
        return disk.sha256_of(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; {MANIFEST} names it") from None


class Joined:
    """Arrays of equal rows behind one another as one, read where they lie; what is indexed comes out as an ordinary
    array.

    Args:
        parts: memory maps.
        add: what is added to the values of each; None: nothing.
    """

    def __init__(self, parts: Sequence[np.ndarray], add: Sequence[int] | None = None) -> None:
        self.parts, self.add = list(parts), [0] * len(parts) if add is None else list(add)
        self.starts = np.cumsum([0, *(len(p) for p in parts)])
        self.shape, self.dtype, self.ndim = (int(self.starts[-1]), *parts[0].shape[1:]), parts[0].dtype, parts[0].ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key):
        if isinstance(key, tuple):
            rows = self[key[0]]
            return rows[(slice(None),) * (rows.ndim - self.ndim + 1) + key[1:]]
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            return self._range(first, last) if step == 1 else self[np.arange(first, last, step)]
        rows = np.asarray(key)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if rows.size and (rows.min() < -len(self) or rows.max() >= len(self)):
            raise IndexError(f"row {rows.max()} of {len(self)}")
        rows = np.where(rows < 0, rows + len(self), rows)
        out = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        owner = np.searchsorted(self.starts, rows, side="right") - 1
        for part in np.unique(owner):
            mine = owner == part
            out[mine] = self.parts[part][rows[mine] - self.starts[part]] + self.dtype.type(self.add[part])
        return out if rows.ndim else out[()]

    def _range(self, first: int, last: int) -> np.ndarray:
        pieces = []
        for part, add, start in zip(self.parts, self.add, self.starts):
            if (a := max(first - start, 0)) < (b := min(last - start, len(part))):
                pieces.append(part[a:b] + self.dtype.type(add) if add else part[a:b])
        return (
            pieces[0]
            if len(pieces) == 1
            else np.concatenate(pieces)
            if pieces
            else np.zeros((0, *self.shape[1:]), self.dtype)
        )


class _Documents(Sequence):
    """The entries of all shards, their first chunks counted through."""

    def __init__(self, shards: list[TokenStore]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(len(s.documents) for s in shards)]).tolist()
        self.chunks = np.cumsum([0, *(len(s) for s in shards)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = int(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        number %= len(self)
        shard = bisect.bisect_right(self.starts, number) - 1
        entry = self.shards[shard].documents[number - self.starts[shard]]
        return entry._replace(first_chunk=entry.first_chunk + self.chunks[shard])

    def __iter__(self) -> Iterator[Entry]:
        for shard, first in zip(self.shards, self.chunks):
            for entry in shard.documents:
                yield entry._replace(first_chunk=entry.first_chunk + first)


class ShardedStore(TokenStore):
    """A store of many shards, with all that a `TokenStore` has; its arrays are `Joined`.

    Attributes:
        shards: the TokenStores. first_documents: the number of each one's first document.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.shards = [TokenStore(path, verify=verify) for path in folders(self.folder, one.FORM.kind, one.MANIFEST)]
        for name in ("chunk_len", "vocab_size", "tokenizer_name", "bos_id"):
            setattr(self, name, getattr(self.shards[0], name))
            if {getattr(shard, name) for shard in self.shards} != {getattr(self, name)}:
                raise ValueError(f"{self.folder}: its shards differ in {name}")
        for name in ("num_chunks", "num_tokens", "num_bytes"):
            setattr(self, name, sum(getattr(shard, name) for shard in self.shards))
        identities = [shard.identity for shard in self.shards]
        self.identity = hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:16]
        self.documents = _Documents(self.shards)
        self.first_documents = self.documents.starts[:-1]
        for name in ("tokens", "lengths", "chunk_bytes"):
            setattr(self, name, Joined([getattr(shard, name) for shard in self.shards]))
        self.chunk_doc = Joined([shard.chunk_doc for shard in self.shards], self.first_documents)


def open_store(folder: str | Path, *, verify: bool = True) -> TokenStore:
    """The store in a folder, of one shard or of many. Arguments and errors as `TokenStore`."""
    folder = Path(folder)
    sharded = (folder / MANIFEST).exists() or (folder / name_of(0)).is_dir()
    return (ShardedStore if sharded else TokenStore)(folder, verify=verify)


def shards_of(store: TokenStore) -> list[TokenStore]:
    """The shards of a store; a small one is its own."""
    return getattr(store, "shards", [store])


def build_sharded_store(
    folder: str | Path,
    sources: Sequence[Iterable | Callable[[], Iterable]],
    tokenizer,
    *,
    executor: Executor | None = None,
    **options,
) -> ShardedStore:
    """A store whose shard s holds the documents of sources[s]; killed anywhere, or run again, it continues.

        sources = [functools.partial(read_articles, path) for path in sorted(folder.glob("*.jsonl"))]
        with Client("scheduler:8786") as client:
            store = build_sharded_store("store", sources, tokenizer, executor=client.get_executor())

    Args:
        folder: gets a folder a shard and `shards.json`.
        sources: what can be pickled: documents as `build_store` takes them, or functions without arguments that give
            them.
        tokenizer, options: as in `build_store`.
        executor: see `executors`; None: here.

    Raises:
        As `build_store`; retro_model.base.disk.Busy where another process builds the folder.
    """
    folder = Path(folder)
    if not len(sources):
        raise ValueError("sources: expected at least one, a shard each; got none")
    with building(folder, one.FORM.kind):
        each(
            _store_shard,
            [(folder / name_of(s), source, tokenizer, options) for s, source in enumerate(sources)],
            executor,
        )
        write_manifest(folder, one.FORM.kind, one.MANIFEST, len(sources))
    return ShardedStore(folder, verify=False)


def building(folder: Path, kind: str) -> disk.Lock:
    """Lock a folder of shards, so that a second build is refused at once."""
    disk.make_folder(folder)
    return disk.Lock(folder / f".{MANIFEST}.lock", f"{folder}: the {kind} is being built")


def _store_shard(folder: Path, source, tokenizer, options: dict) -> None:
    one.build_store(folder, source() if callable(source) else source, tokenizer, **options)
