"""Compiled kernels as a folder: exported on one machine, and copied into the Triton cache of others.

Triton's cache key depends on the sources of Triton and of the kernel, on types and on options. So a folder serves only
the versions of Triton and Python that made it. Files of the cache contain absolute paths, which `take_over` rewrites.

The GPU's code and its launch parameters are trusted. Triton's cache also holds shared libraries that the host loads:
`take_over` never copies them, nor links, nor files of other names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from . import triton_private

MANIFEST = "retro-kernels.json"
_GROUP = "__grp__"  # prefix of the file that lists the other files of its entry
_ENTRY = re.compile(r"[A-Z2-7]{52}")  # a SHA-256 in base 32
#: files that the host doesn't execute
_FILE = re.compile(r"[A-Za-z_]\w*\.(source|ttir|ttgir|llir|ptx|cubin|amdgcn|hsaco|json)", re.ASCII)


def identity() -> dict[str, str]:
    """Return the parts of a compiled kernel's key that do not depend on its arguments."""
    import triton

    sources = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for path in sorted([*package.glob("ops/*/triton/*.py"), *package.glob("triton_lib/*.py")]):
        sources.update(path.read_bytes())
    return {
        "triton": triton.__version__,
        "python": platform.python_version().rpartition(".")[0],
        "compiler": hashlib.sha256(triton_private.compiler_key().encode()).hexdigest(),
        "kernels": sources.hexdigest(),
    }


def export(folder: Path, arches: Iterable[int | str], only: str | None = None, jobs: int | None = None) -> int:
    """Compile the launches of the published models for GPUs of `arches` into `folder`, and return their number.

    After an interruption it continues. only: part of the kernels' names.
    """
    from . import aot

    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder.resolve())):
        count = sum(1 for _ in aot.compile_each(arches, only, jobs=jobs))
    (folder / MANIFEST).write_text(json.dumps(identity(), indent=1))
    return count


def take_over(folder: str | os.PathLike) -> int:
    """Copy the kernels of a folder made by `export` into this machine's Triton cache, and return their number."""
    import triton

    entries = _checked(Path(folder))
    for name, files in entries.items():
        _copied(files, Path(triton.knobs.cache.dir) / name)
    return sum(any(name.endswith((".cubin", ".hsaco")) for name in files) for files in entries.values())


def _checked(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the entries of a folder, with their files. Raises ValueError if it does not fit this machine."""
    try:
        made = json.loads(_content(folder / MANIFEST))
        said = f"triton {made['triton']} on Python {made['python']}"
        keys = made["compiler"], made["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        made_by = "a folder that `python -m retro_kernels.compile.aot --cache` made"
        raise ValueError(f"cache: expected {made_by}; got {folder} ({error})") from error
    here = identity()
    if keys[0] != here["compiler"]:
        compiler = f"triton {here['triton']} on Python {here['python']}"
        raise ValueError(f"cache: expected kernels compiled by {compiler}, as here; got a folder of {said}")
    if keys[1] != here["kernels"]:
        raise ValueError("cache: expected kernels of this version of retro_kernels; got a folder of another's")
    entries = [entry for entry in sorted(folder.iterdir()) if _ENTRY.fullmatch(entry.name)]
    return {entry.name: _files(entry) for entry in entries if entry.is_dir() and not entry.is_symlink()}


def _files(entry: Path) -> dict[str, bytes]:
    """Return the regular files of an entry that are named like a compiled kernel's file."""
    found = {}
    for file in sorted(entry.iterdir()):
        if _FILE.fullmatch(file.name):
            try:
                found[file.name] = _content(file)
            except ValueError:
                continue
    return found


def _content(file: Path) -> bytes:
    """Read a regular file, never through a link. Raises: ValueError, FileNotFoundError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{file} is no regular file") from None
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{file} is no regular file")
        return opened.read()


def _copied(files: dict[str, bytes], target: Path) -> None:
    """Copy an entry into Triton's cache. The file that lists the other files is copied last, so that Triton sees the
    whole entry or none of it.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name.startswith(_GROUP)):
        content = files[name]
        if name.startswith(_GROUP):
            children = json.loads(content)["child_paths"]
            kept = {child: str(target / child) for child in children if child in files}
            content = json.dumps({"child_paths": kept}).encode()
        new = target / f"{name}.{uuid.uuid4().hex}"
        new.write_bytes(content)
        new.replace(target / name)
