"""Folders of shards, read as one. Each shard is an ordinary folder of its kind; `building` writes them.

A small corpus is a single shard without a `shards.json`: the folder itself. Documents never cross a shard. Chunks and
documents are numbered consecutively over all shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retro_model.base import disk

from . import store as one
from .store import TokenStore

MANIFEST, VERSION = "shards.json", 1


def name_of(shard: int) -> str:
    return f"{shard:05d}"


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
            raise ValueError(f"expected a {kind} of version {VERSION}; got {listing['kind']} {listing['version']}")
        wanted = {entry["name"]: entry["sha256"] for entry in listing["shards"]}
        if list(wanted) != [name_of(s) for s in range(len(wanted))] or not wanted:
            raise ValueError("its shards are not numbered from 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: corrupt ({error})") from None
    for name, digest in wanted.items():
        file = folder / name / inner
        if not file.exists() or disk.sha256_of(file) != digest:
            advice = "build again, or restore the whole folder"
            raise ValueError(f"{file}: missing, or of another shard than {MANIFEST} names; {advice}")
    return [folder / name for name in wanted]


def parts_of(folder: Path, kind: str, inner: str, store: TokenStore) -> list[tuple[Path, TokenStore]]:
    """Return `folders` with the shard of the store that each belongs to. Raise ValueError if their numbers differ."""
    parts, stores = folders(folder, kind, inner), shards_of(store)
    if len(parts) != len(stores):
        raise ValueError(f"{folder}: expected the {len(stores)} shards of the store; got {len(parts)}")
    return list(zip(parts, stores))


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
        rows = np.arange(*key.indices(len(self))) if isinstance(key, slice) else np.asarray(key)
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
    """Return a single part unchanged and several parts as `Joined`."""
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
