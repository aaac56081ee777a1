"""Files that grow by appending and a manifest that says how much of them counts: builds that continue after a kill.

A manifest is JSON, replaced atomically: {kind, settings, complete, facts, files: {name: {bytes, crc32}}, crc32}. What a file
holds beyond the bytes its manifest names is the rest of a killed run, and is cut off when the build continues.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
READ_BYTES = 1 << 22  # read at once to compute a checksum


class Build:
    """Writes the files of one build; `commit` makes what was appended durable, `finish` completes it.

    Args:
        manifest: path of the manifest; the files lie beside it.
        kind: what is built, e.g. "token store".
        settings: everything the result depends on, as JSON; a build with others is refused.
        files: names of the files, each with the bytes it starts with.
    """

    def __init__(self, manifest: Path, kind: str, settings: dict, files: dict[str, bytes]) -> None:
        self.path, self.kind = Path(manifest), kind
        self.settings = json.loads(json.dumps(settings))
        self.complete, self.facts = False, {}
        self._handles: dict[str, Any] = {}
        if self.path.exists():
            found = read_manifest(self.path, kind)
            same_settings(self.path, self.settings, found["settings"])
            self.complete, self.facts, self.files = found["complete"], found["facts"], found["files"]
            check_files(self.path, self.files, verify=True, exact=self.complete)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.files = {name: {"bytes": 0, "crc32": 0} for name in files}
        if self.complete:
            return
        for name, record in self.files.items():
            path = self.path.parent / name
            path.touch()
            os.truncate(path, record["bytes"])
            self._handles[name] = path.open("ab")
            if not record["bytes"]:
                self.append(name, files[name])

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Adds to the end of a file; an array in C order."""
        data = memoryview(np.ascontiguousarray(data)).cast("B") if isinstance(data, np.ndarray) and data.size else bytes(data)
        self._handles[name].write(data)
        record = self.files[name]
        self.files[name] = {"bytes": record["bytes"] + len(data), "crc32": zlib.crc32(data, record["crc32"])}

    def commit(self, **facts) -> None:
        """What was appended so far counts, together with `facts` (the progress), even after a kill or a power cut."""
        for handle in self._handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.facts = facts
        whole = {"kind": self.kind, "version": VERSION, "settings": self.settings, "complete": self.complete}
        whole |= {"facts": self.facts, "files": self.files}
        write_json(self.path, {**whole, "crc32": _own_checksum(whole)})

    def finish(self, **facts) -> None:
        """The build is complete; the same files and manifest come out whether or not it was interrupted."""
        self.complete = True
        self.commit(**facts)
        self.close()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles = {}

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_manifest(path: Path, kind: str, *, complete: bool = False) -> dict:
    """A manifest of the kind expected; `complete`: refuse that of an unfinished build.

    Raises:
        FileNotFoundError, ValueError: naming the path.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no {kind} here")
    try:
        found = json.loads(path.read_text())
        known = found["kind"], found["version"], found["settings"], found["complete"], found["facts"], found["files"]
        if found.pop("crc32") != _own_checksum(found):
            raise KeyError("its checksum is another")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the manifest is corrupt ({error!r})") from error
    if known[:2] != (kind, VERSION):
        raise ValueError(f"{path}: expected a {kind} of version {VERSION}; got a {known[0]} of version {known[1]}")
    if complete and not found["complete"]:
        raise ValueError(f"{path}: the {kind} is unfinished; run the same build again and it continues")
    return found


def _own_checksum(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def same_settings(path: Path, wanted: dict, found: dict) -> None:
    """Raises ValueError that names the first setting in which a build on disk differs."""
    for key in sorted({*wanted, *found}):
        if wanted.get(key) != found.get(key):
            raise ValueError(f"{path}: built with {key}={found.get(key)!r}; now {key}={wanted.get(key)!r}: delete it or build elsewhere")


def check_files(manifest: Path, files: dict, *, verify: bool, exact: bool = True) -> None:
    """Raises ValueError that names the file that is missing, too short or (exact) long, or (verify) of another checksum."""
    for name, record in files.items():
        path = Path(manifest).parent / name
        if not path.exists():
            raise ValueError(f"{path}: missing; {Path(manifest).name} names {record['bytes']} bytes")
        size = path.stat().st_size
        if size < record["bytes"] or (exact and size != record["bytes"]):
            raise ValueError(f"{path}: truncated or corrupt; expected {record['bytes']} bytes, got {size}")
        if verify and (crc := checksum(path, record["bytes"])) != record["crc32"]:
            raise ValueError(f"{path}: corrupt; expected crc32 {record['crc32']:08x}, got {crc:08x}")


def record(path: Path) -> dict:
    """What a manifest says of a file that was written by somebody else."""
    size = Path(path).stat().st_size
    return {"bytes": size, "crc32": checksum(path, size)}


def checksum(path: Path, size: int) -> int:
    """crc32 of a file's first `size` bytes."""
    crc = 0
    with Path(path).open("rb") as handle:
        while size > 0 and (block := handle.read(min(size, READ_BYTES))):
            crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def write_json(path: Path, value: Any) -> None:
    """Replaces a file at once: a reader, or a kill, finds the old text or the new one, never a part."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as handle:
        json.dump(value, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def mapped(path: Path, dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only memory map of a raw file (an ordinary array where it is empty)."""
    return np.memmap(path, dtype, "r", shape=shape) if np.prod(shape) else np.zeros(shape, dtype)


def track(items: Iterable, description: str, *, total: int | None = None, enabled: bool = False) -> Iterator:
    """The items, with rich's progress bar if `enabled`."""
    if not enabled:
        return iter(items)
    try:
        from rich.progress import track as rich_track
    except ImportError as error:
        raise ImportError("progress=True needs rich (pip install rich)") from error
    return iter(rich_track(items, description, total=total))
