"""Builds that continue after a kill: files that grow by appending, and a manifest with their committed sizes.

A manifest is JSON, replaced atomically: {kind, version, settings, complete, facts, files: {name: {bytes, crc32}}}.
Bytes beyond the committed size are left from a killed run, and the next build truncates them. One process builds; a
second process is refused. A folder may come from a stranger: only the expected names are opened, never through a link,
and a manifest that contradicts its files is refused.
"""

from __future__ import annotations

import contextlib
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


class Form(NamedTuple):
    """Schema of manifests of one kind.

    kind: name of the kind in errors, e.g. "token store". files: names of the files. counts: names of the facts that
    are counts.
    """

    kind: str
    files: tuple[str, ...]
    counts: tuple[str, ...] = ()


class Build(contextlib.AbstractContextManager):
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
        self._held = contextlib.ExitStack()  # the lock and the handles
        self._continue(complete_only=True)
        if self.complete:
            return
        disk.make_folder(self.path.parent)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with contextlib.ExitStack() as held:
            held.enter_context(disk.Lock(lock, f"{self.path}: the {form.kind} is being built"))
            self._continue()  # again: the last holder of the lock may have continued or finished the build
            for name, record in self.files.items():
                handle = self._handles[name] = held.enter_context(disk.open_plain(self.path.parent / name, "ab"))
                os.ftruncate(handle.fileno(), record["bytes"])
                if not record["bytes"]:
                    self.append(name, (starts or {}).get(name, b""))
            self._held = held.pop_all()

    def _continue(self, complete_only: bool = False) -> None:
        """Restore the state in the manifest on disk, if there is one."""
        if not self.path.exists():
            return
        manifest = read_manifest(self.path, self.form)
        same_settings(self.path, self.settings, manifest["settings"])
        if manifest["complete"] or not complete_only:
            check_files(self.path, manifest, verify=self.verify or not manifest["complete"])
            self.complete, self.facts, self.files = manifest["complete"], manifest["facts"], manifest["files"]

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Append bytes, or an array in C order, to a file."""
        data = data.tobytes() if isinstance(data, np.ndarray) else data
        self._handles[name].write(data)
        record = self.files[name]
        self.files[name] = {"bytes": record["bytes"] + len(data), "crc32": zlib.crc32(data, record["crc32"])}

    def adopt(self, name: str, written: Path) -> None:
        """Replace the file `name` by a file that a library has written."""
        self._handles.pop(name).close()
        disk.sync(written)
        file = written.replace(self.path.parent / name)
        size = file.stat().st_size
        self.files[name] = {"bytes": size, "crc32": checksum(file, size)}

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
        self._held.close()

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
        kind, version, named = manifest["kind"], manifest["version"], manifest["files"]
        counts = [manifest["facts"][name] for name in form.counts]
        counts += [record[what] for record in named.values() for what in ("bytes", "crc32")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"its counts are {counts}")
        if not isinstance(manifest["settings"], dict) or type(manifest["complete"]) is not bool:
            raise ValueError("its settings are not an object, or it does not say whether it is complete")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the manifest is corrupt ({error})") from error
    if (kind, version) != (form.kind, VERSION):
        raise ValueError(f"{path}: expected a {form.kind} of version {VERSION}; got a {kind} of version {version}")
    if named.keys() != {*form.files}:  # no other file is ever opened, least of all one in another folder
        raise ValueError(f"{path}: expected the files {', '.join(form.files)}; the manifest names {', '.join(named)}")
    if complete and not manifest["complete"]:
        raise ValueError(f"{path}: the {form.kind} is unfinished; run the same build again and it continues")
    return manifest


def same_settings(path: Path, wanted: dict, kept: dict) -> None:
    """Raise ValueError that names the first setting in which a build on disk differs."""
    for key in sorted({*wanted, *kept}):
        was, now = kept.get(key), wanted.get(key)
        if was != now:
            raise ValueError(f"{path}: built with {key}={was!r}; now {key}={now!r}: delete it or build elsewhere")


def check_files(path: Path, manifest: dict, *, verify: bool) -> None:
    """Check the files against their manifest. Files of an unfinished build may be longer than it says.

    verify: compare checksums.
    Raises: ValueError naming the file that is missing, is a link, or has another size or checksum.
    """
    for name, record in manifest["files"].items():
        file, want = path.parent / name, record["bytes"]
        disk.check_plain(file)
        if not file.exists():
            raise ValueError(f"{file}: missing; {path.name} names {want} bytes")
        size = file.stat().st_size
        if size < want or (manifest["complete"] and size != want):
            raise ValueError(f"{file}: truncated or corrupt; expected {want} bytes, got {size}")
        if verify and (crc := checksum(file, want)) != record["crc32"]:
            raise ValueError(f"{file}: corrupt; expected crc32 {record['crc32']:08x}, got {crc:08x}")


def checksum(path: Path, size: int) -> int:
    """Return the crc32 of the first `size` bytes of a file."""
    return zlib.crc32(np.memmap(path, np.uint8, "r", shape=(size,))) if size else 0


def mapped(path: Path, dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map a raw file, read-only. An empty array is an ordinary one.

    Raises: ValueError naming the file if its size does not fit the shape.
    """
    disk.check_plain(path)
    size, want = path.stat().st_size, math.prod(shape) * np.dtype(dtype).itemsize
    if size != want:
        raise ValueError(f"{path}: expected {want} bytes for {np.dtype(dtype)} {list(shape)}; got {size}")
    return np.memmap(path, dtype, "r", shape=shape) if size else np.zeros(shape, dtype)


def npy_header(shape: tuple[int, ...], dtype) -> bytes:
    """Return the header of an .npy file of this shape; the rows can be appended to it."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def mapped_npy(path: Path, dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map an .npy file, read-only. Raise ValueError naming the file unless it has this type and shape."""
    disk.check_plain(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path}: corrupt ({error})") from error
    if (array.dtype, array.shape) != (np.dtype(dtype), shape):
        want, got = f"{np.dtype(dtype)} {list(shape)}", f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{path}: expected an array {want}; got {got}")
    return array
