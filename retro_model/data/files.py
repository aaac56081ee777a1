"""Builds that continue after a kill: files that grow by appending, and a manifest with their committed sizes.

A manifest is JSON, replaced atomically: {kind, version, settings, complete, facts, files: {name: {bytes, crc32}}}.
Bytes beyond the committed size are left from a killed run, and the next build truncates them. One process builds; a
second process is refused. A folder may come from a stranger: only the expected names are opened, never through a link,
and a manifest that contradicts its files is refused.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retro_model.base import disk

VERSION = 1
READ_BYTES = 1 << 22  # read at once to compute a checksum


class Form(NamedTuple):
    """Schema of manifests of one kind.

    kind: name of the kind in errors, e.g. "token store". files: names of the files. counts: names of the facts that
    are counts.
    """

    kind: str
    files: tuple[str, ...]
    counts: tuple[str, ...] = ()


class Build:
    """Writer of the files of one build. `commit` makes the appended data durable, `finish` completes the build.

    manifest: path of the manifest; the files are in its folder.
    form: schema of the manifest.
    settings: everything the result depends on, as JSON; a build with other settings is refused.
    starts: headers of the files that have one.
    verify: compare checksums of a complete build; those of an unfinished one are always compared.

    Raises:
        ValueError: the folder holds something else or a damaged file.
        retro_model.base.disk.Busy: another process is building here.
    """

    def __init__(
        self, manifest: Path, form: Form, settings: dict, starts: dict[str, bytes] | None = None, *, verify: bool = True
    ) -> None:
        self.path, self.form, self.verify = manifest, form, verify
        self.settings = json.loads(json.dumps(settings))
        self.complete, self.facts = False, {}
        self.files = {name: {"bytes": 0, "crc32": 0} for name in form.files}
        self._handles: dict[str, Any] = {}
        self._lock: disk.Lock | None = None
        self._continue(complete_only=True)
        if self.complete:
            return
        disk.make_folder(self.path.parent)
        lock = self.path.with_name(f".{self.path.name}.lock")
        self._lock = disk.Lock(lock, f"{self.path}: the {form.kind} is being built")
        try:
            self._continue()  # again: the last holder of the lock may have continued or finished the build
            if self.complete:
                self.close()
                return
            for name, record in self.files.items():
                handle = self._handles[name] = disk.open_plain(self.path.parent / name, "ab")
                os.ftruncate(handle.fileno(), record["bytes"])
                if not record["bytes"]:
                    self.append(name, (starts or {}).get(name, b""))
        except BaseException:
            self.close()
            raise

    def _continue(self, complete_only: bool = False) -> None:
        """Restore the state in the manifest on disk, if there is one."""
        if not self.path.exists():
            return
        manifest = read_manifest(self.path, self.form)
        same_settings(self.path, self.settings, manifest["settings"])
        if manifest["complete"] or not complete_only:
            check_files(self.path, self.form, manifest, verify=self.verify or not manifest["complete"])
            self.complete, self.facts, self.files = manifest["complete"], manifest["facts"], manifest["files"]

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Append bytes, or an array in C order, to a file."""
        array = isinstance(data, np.ndarray) and data.size
        data = memoryview(np.ascontiguousarray(data)).cast("B") if array else bytes(data)
        self._handles[name].write(data)
        record = self.files[name]
        self.files[name] = {"bytes": record["bytes"] + len(data), "crc32": zlib.crc32(data, record["crc32"])}

    def adopt(self, name: str, written: Path) -> None:
        """Replace the file `name` by a file that a library has written."""
        self._handles.pop(name).close()
        disk.sync(written)
        file = written.replace(self.path.parent / name)
        size = file.stat().st_size
        with disk.open_plain(file, "rb") as handle:
            self.files[name] = {"bytes": size, "crc32": checksum(handle, size)}

    def commit(self, **facts) -> None:
        """Commit the appended data and `facts` (the progress): they survive a kill and a power cut."""
        for handle in self._handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.facts = facts
        whole = {"kind": self.form.kind, "version": VERSION, "settings": self.settings, "complete": self.complete}
        disk.write_json(self.path, whole | {"facts": facts, "files": self.files})

    def finish(self, **facts) -> None:
        """Commit and mark the build complete. An interrupted build ends with the same bytes as an uninterrupted one."""
        self.complete = True
        self.commit(**facts)
        self.close()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles = {}
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_manifest(path: Path, form: Form, *, complete: bool = False) -> dict:
    """Read a manifest and check its form. complete: refuse the manifest of an unfinished build.

    Raises: FileNotFoundError, ValueError naming the path.
    """
    if not path.exists() and not path.is_symlink():
        raise FileNotFoundError(f"{path}: no {form.kind} here")
    try:
        manifest = disk.read_json(disk.read_plain(path))
        known = tuple(manifest[key] for key in ("kind", "version", "settings", "complete", "facts", "files"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the manifest is corrupt ({error})") from error
    if known[:2] != (form.kind, VERSION):
        raise ValueError(f"{path}: expected a {form.kind} of version {VERSION}; got a {known[0]} of version {known[1]}")
    _check_types(path, form, manifest)
    if complete and not manifest["complete"]:
        raise ValueError(f"{path}: the {form.kind} is unfinished; run the same build again and it continues")
    return manifest


def _check_types(path: Path, form: Form, manifest: dict) -> None:
    for name, kind in (("settings", dict), ("complete", bool), ("facts", dict), ("files", dict)):
        if not isinstance(manifest[name], kind):
            raise ValueError(f"{path}: the manifest is corrupt ({name} is no {kind.__name__})")
    if manifest["files"].keys() != set(form.files):
        named = ", ".join(manifest["files"]) or "none"
        raise ValueError(f"{path}: expected the files {', '.join(form.files)}; the manifest names {named}")
    for name, record in manifest["files"].items():
        if (
            not isinstance(record, dict)
            or record.keys() != {"bytes", "crc32"}
            or not all(map(_is_count, record.values()))
        ):
            raise ValueError(f"{path}: the manifest is corrupt ({name} is {record!r})")
    for name in form.counts:
        if not _is_count(manifest["facts"].get(name)):
            raise ValueError(f"{path}: the manifest is corrupt ({name} is {manifest['facts'].get(name)!r})")


def _is_count(value) -> bool:
    return type(value) is int and value >= 0


def same_settings(path: Path, wanted: dict, kept: dict) -> None:
    """Raise ValueError that names the first setting in which a build on disk differs."""
    for key in sorted({*wanted, *kept}):
        was, now = kept.get(key), wanted.get(key)
        if was != now:
            raise ValueError(f"{path}: built with {key}={was!r}; now {key}={now!r}: delete it or build elsewhere")


def check_files(path: Path, form: Form, manifest: dict, *, verify: bool, **counts: int) -> None:
    """Check the files against their manifest. Files of an unfinished build may be longer than it says.

    verify: compare checksums. counts: expected values of facts.
    Raises: ValueError naming the file that is missing, is a link, or has another size or checksum.
    """
    for name, count in counts.items():
        if manifest["facts"][name] != count:
            raise ValueError(f"{path}: expected {count} {name}; the manifest has {manifest['facts'][name]}")
    for name, record in manifest["files"].items():
        file = path.parent / name
        try:
            handle = disk.open_plain(file, "rb")
        except FileNotFoundError:
            raise ValueError(f"{file}: missing; {path.name} names {record['bytes']} bytes") from None
        with handle:
            size = os.fstat(handle.fileno()).st_size
            if size < record["bytes"] or (manifest["complete"] and size != record["bytes"]):
                raise ValueError(f"{file}: truncated or corrupt; expected {record['bytes']} bytes, got {size}")
            if verify and (crc := checksum(handle, record["bytes"])) != record["crc32"]:
                raise ValueError(f"{file}: corrupt; expected crc32 {record['crc32']:08x}, got {crc:08x}")


def checksum(handle, size: int) -> int:
    """Return the crc32 of the next `size` bytes."""
    crc = 0
    while size > 0 and (block := handle.read(min(size, READ_BYTES))):
        crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def mapped(path: Path, dtype, shape: tuple[int, ...], *, start: int = 0) -> np.ndarray:
    """Map a raw file from byte `start` to its end, read-only. An empty array is an ordinary one.

    Raises: ValueError naming the file if its size does not fit the shape.
    """
    with disk.open_plain(path, "rb") as handle:
        size, want = os.fstat(handle.fileno()).st_size, start + math.prod(shape) * np.dtype(dtype).itemsize
        if size != want:
            raise ValueError(f"{path}: expected {want} bytes for {np.dtype(dtype)} {list(shape)}; got {size}")
        return np.memmap(handle, dtype, "r", offset=start, shape=shape) if size > start else np.zeros(shape, dtype)


def npy_header(shape: tuple[int, ...], dtype) -> bytes:
    """Return the header of an .npy file of this shape; the rows can be appended to it."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def mapped_npy(path: Path, dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map an .npy file, read-only. Raise ValueError naming the file unless it has this type and shape."""
    header = npy_header(shape, dtype)
    with disk.open_plain(path, "rb") as handle:
        if handle.read(len(header)) != header:
            want = f"an array {np.dtype(dtype)} {list(shape)}"
            raise ValueError(f"{path}: expected {want}; its header has another type or shape")
    return mapped(path, dtype, shape, start=len(header))
