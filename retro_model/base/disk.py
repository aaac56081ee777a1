"""File-system helpers of builds and checkpoints: locks, untrusted JSON, regular files, atomic and durable writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import filelock


class Busy(RuntimeError):
    """Another process holds the lock."""


class Lock(contextlib.AbstractContextManager):
    """Lock on a file, by filelock. The operating system releases the lock when the process ends, also by a kill.

        with Lock(folder / ".store.json.lock", f"{folder} is being built"):
            ...

    The file stays after the release and names its last holder.

    Args:
        path: path of the lock file, in an existing folder.
        what: first words of the error.

    Raises:
        Busy: another process holds the lock; the error names it. `Lock` does not wait.
        ValueError: the path is not a regular file.
    """

    def __init__(self, path: Path, what: str) -> None:
        check_plain(path)
        self._lock = filelock.FileLock(path, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            holder = path.read_text(errors="replace")[:200].strip() or "another process"
            raise Busy(f"{what} by {holder}") from None
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")

    def release(self) -> None:
        self._lock.release()

    def __exit__(self, *_) -> None:
        self.release()


def check_plain(path: Path) -> None:
    """Raise ValueError if the path is a link, a pipe or a folder: a folder may come from a stranger."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        got = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{path}: expected a regular file; got {got}")


def open_plain(path: Path, mode: str = "rb"):
    """Open a regular file, never through a link. Raises: FileNotFoundError; ValueError, see `check_plain`."""
    check_plain(path)
    return open(path, mode)


def read_plain(path: Path) -> bytes:
    """Return the content of a regular file. Raises as `open_plain`."""
    with open_plain(path) as handle:
        return handle.read()


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents; sync each name."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_plain(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one, also after a kill."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # never written through, if it is a link
    with open(temporary, "xb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file. Raises as `open_plain`."""
    with open_plain(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value as JSON, atomically."""
    write_plain(path, json.dumps(value, indent=1).encode())


def read_json(text: str | bytes) -> Any:
    """Return the value of untrusted JSON. Raises: ValueError, also for too deep nesting and too long numbers."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
