"""File-system helpers of builds and checkpoints: locks, untrusted JSON, regular files, atomic and durable writes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import warnings
from pathlib import Path
from typing import Any

import filelock

LONGEST_NUMBER = 400  # digits; no float has more
#: errors of file systems without locks
UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


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
        ValueError: the path is not a regular file, or has a second hard link.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = Path(path)
        if self.path.is_symlink() or self.path.exists():
            status = os.lstat(self.path)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # writing would change the other name's file
                raise ValueError(f"{self.path}: expected a lock file with one name; got {_kind(self.path)}")
        self._lock = filelock.FileLock(self.path, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            holder = self.path.read_text(errors="replace")[:200].strip() or "another process"
            raise Busy(f"{what} by {holder}") from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            advice = f"this file system has no locks ({error}); a second process may write here too"
            warnings.warn(f"{self.path}: {advice}", stacklevel=2)
        else:
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")

    def release(self) -> None:
        self._lock.release()

    def __exit__(self, *_) -> None:
        self.release()


def open_plain(path: Path, mode: str):
    """Open a regular file, never through a link.

    mode: "rb"; "ab", which makes a missing file; "xb", which replaces an existing one.
    Raises: FileNotFoundError; ValueError if the path is a link, a pipe or a folder, or, to append, has a second hard
        link.
    """
    writing = os.O_WRONLY | os.O_CREAT
    flags = {"rb": os.O_RDONLY, "ab": writing | os.O_APPEND, "xb": writing | os.O_EXCL}[mode]
    if mode == "xb":
        path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EMLINK):
            raise ValueError(f"{path}: expected a regular file; got {_kind(path)}") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (mode == "ab" and status.st_nlink > 1):
        os.close(descriptor)
        raise ValueError(f"{path}: expected a regular file with one name; got {_kind(path)}")
    return os.fdopen(descriptor, mode)


def read_plain(path: Path) -> bytes:
    """Return the content of a regular file. Raises as `open_plain`."""
    with open_plain(path, "rb") as handle:
        return handle.read()


def _kind(path: Path) -> str:
    status = os.lstat(path)
    kinds = {"a link": stat.S_ISLNK, "a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO}
    named = [name for name, test in kinds.items() if test(status.st_mode)]
    return named[0] if named else f"one with {status.st_nlink} names" if status.st_nlink > 1 else "something else"


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
    with open_plain(temporary, "xb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file. Raises as `open_plain`."""
    with open_plain(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value as JSON, atomically."""
    write_plain(path, json.dumps(value, indent=1).encode())


def read_json(text: str | bytes) -> Any:
    """Return the value of untrusted JSON.

    Raises: ValueError for text that is not JSON, for too deep nesting, and for a number of more than LONGEST_NUMBER
        digits.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)
