"""Folders of shards: each shard is an ordinary folder of its kind. A manifest, `shards.json`, is written last.

A small corpus is a single shard without a `shards.json`: the folder itself. Documents never cross a shard. Chunks and
documents are numbered consecutively over all shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from retro_model.base import disk

from . import store as one
from .executors import each
from .store import TokenStore

MANIFEST, VERSION = "shards.json", 1


def name_of(shard: int) -> str:
    return f"{shard:05d}"


def build(
    folder: Path, kind: str, inner: str, task: Callable, arguments: Sequence[tuple], executor: Executor | None
) -> None:
    """Run task(shard's folder, *arguments) for each shard, then write `shards.json`. A second build is refused at once.

    inner: file name of the shards' own manifests, whose digests go into `shards.json`.
    """
    disk.make_folder(folder)
    with disk.Lock(folder / f".{MANIFEST}.lock", f"{folder}: the {kind} is being built"):
        names = [name_of(s) for s in range(len(arguments))]
        each(task, [(folder / name, *rest) for name, rest in zip(names, arguments)], executor)
        entries = [{"name": name, "sha256": _digest(folder / name / inner)} for name in names]
        disk.write_json(folder / MANIFEST, {"kind": kind, "version": VERSION, "shards": entries})


def folders(folder: Path, kind: str, inner: str) -> list[Path]:
    """Return the folders of the shards; the folder itself if it is a single shard.

    Raises:
        FileNotFoundError, ValueError: naming the file; a shard's manifest has another digest than `shards.json` says.
    """
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        if (folder / name_of(0)).is_dir():
            raise ValueError(f"{path}: missing, the {kind} is unfinished; run the same build again and it continues")
        return [folder]
    try:
        listing = disk.read_json(disk.read_plain(path))
        if (listing["kind"], listing["version"]) != (kind, VERSION):
            got = f"a {listing['kind']} of version {listing['version']}"
            raise ValueError(f"expected a {kind} of version {VERSION}; got {got}")
        wanted = {entry["name"]: entry["sha256"] for entry in listing["shards"]}
        if list(wanted) != [name_of(s) for s in range(len(wanted))] or not wanted:
            raise ValueError("its shards are not numbered from 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: corrupt ({error})") from None
    for name, digest in wanted.items():
        if _digest(file := folder / name / inner) != digest:
            advice = "build again, or restore the whole folder"
            raise ValueError(f"{file}: another shard than {MANIFEST} names; {advice}")
    return [folder / name for name in wanted]


def parts_of(folder: Path, kind: str, inner: str, store: TokenStore) -> list[tuple[Path, TokenStore]]:
    """Return `folders` with the shard of the store that each belongs to. Raise ValueError if their numbers differ."""
    parts, stores = folders(folder, kind, inner), shards_of(store)
    if len(parts) != len(stores):
        raise ValueError(f"{folder}: expected the {len(stores)} shards of the store; got {len(parts)}")
    return list(zip(parts, stores))


def _digest(path: Path) -> str:
    try:
        return disk.sha256_of(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; {MANIFEST} names it") from None


class Joined:
    """Concatenation of memory maps along the rows, without a copy. Indexing returns an ordinary array.

    parts: memory maps with rows of one shape.
    add: number added to the values of each part; None: 0.
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
            if step != 1:
                return self[np.arange(first, last, step)]
            pieces = [np.zeros((0, *self.shape[1:]), self.dtype)]
            for part, add, start in zip(self.parts, self.add, self.starts):
                if (a := max(first - start, 0)) < (b := min(last - start, len(part))):
                    pieces.append(part[a:b] + self.dtype.type(add) if add else part[a:b])
            return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)
        rows = np.asarray(key)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if rows.size and (rows.min() < -len(self) or rows.max() >= len(self)):
            raise IndexError(f"rows: expected within {-len(self)} .. {len(self) - 1}; got {rows.min()} .. {rows.max()}")
        rows = np.where(rows < 0, rows + len(self), rows)
        out = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        owner = np.searchsorted(self.starts, rows, side="right") - 1
        for part in np.unique(owner):
            mine = owner == part
            out[mine] = self.parts[part][rows[mine] - self.starts[part]] + self.dtype.type(self.add[part])
        return out if rows.ndim else out[()]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray | Joined:
    """Return a single part as it is, several as `Joined`."""
    return parts[0] if len(parts) == 1 else Joined(parts)


class ShardedStore(TokenStore):
    """TokenStore of many shards. Its arrays are `Joined`.

    Attributes:
        shards: the TokenStores.
        first_documents: number of each shard's first document.
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
        identities = json.dumps([shard.identity for shard in self.shards])
        self.identity = hashlib.sha256(identities.encode()).hexdigest()[:16]
        for name in ("tokens", "lengths", "chunk_bytes"):
            setattr(self, name, Joined([getattr(shard, name) for shard in self.shards]))
        self.documents, self.first_documents = [], []
        for shard, first_chunk in zip(self.shards, self.tokens.starts.tolist()):
            self.first_documents.append(len(self.documents))
            self.documents += [e._replace(first_chunk=e.first_chunk + first_chunk) for e in shard.documents]
        self.chunk_doc = Joined([shard.chunk_doc for shard in self.shards], self.first_documents)


def open_store(folder: str | Path, *, verify: bool = True) -> TokenStore:
    """Open the store in a folder, of one shard or of many. Arguments and errors as `TokenStore`."""
    folder = Path(folder)
    sharded = (folder / MANIFEST).exists() or (folder / name_of(0)).is_dir()
    return (ShardedStore if sharded else TokenStore)(folder, verify=verify)


def shards_of(store: TokenStore) -> list[TokenStore]:
    """Return the shards of a store; [store] if it is a single shard."""
    return getattr(store, "shards", [store])


def build_sharded_store(
    folder: str | Path,
    sources: Sequence[Iterable | Callable],
    tokenizer,
    *,
    executor: Executor | None = None,
    **options,
) -> ShardedStore:
    """Build a store whose shard s holds the documents of sources[s]. Run again after a kill, it continues.

        sources = [functools.partial(read_texts, [path]) for path in find_texts(["rows/*.jsonl"])]
        with Client("scheduler:8786") as client:
            store = build_sharded_store("store", sources, tokenizer, executor=client.get_executor())

    folder: output folder, with one folder a shard and `shards.json`.
    sources: documents as `build_store` takes them, or functions without arguments that return them; picklable.
    tokenizer, options: as in `build_store`.
    executor: runs the shards, see `executors`; None: this process. Without `skipped`, because a list does not come back
        from another process.
    Raises: as `build_store`; retro_model.base.disk.Busy if another process builds the folder.
    """
    folder = Path(folder)
    if not len(sources):
        raise ValueError("sources: expected at least one, a shard each; got none")
    if executor is not None and options.get("skipped") is not None:
        raise ValueError("skipped: expected None with an executor, whose processes have lists of their own; got a list")
    calls = [(source, tokenizer, options) for source in sources]
    build(folder, one.FORM.kind, one.MANIFEST, _store_shard, calls, executor)
    return ShardedStore(folder, verify=False)


def _store_shard(folder: Path, source, tokenizer, options: dict) -> None:
    one.build_store(folder, source() if callable(source) else source, tokenizer, **options)
