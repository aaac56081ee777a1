"""Compiled kernels as a folder that travels: made on any machine, taken over where the same Triton runs.

Triton finds what it compiled by a key of its own sources, the kernel's, the types and the options, so a folder serves
the very version of Triton (and of Python, for which Triton is built) that made it. Its entries name each other by
absolute paths: a copy of a cache is of no use elsewhere until these are rewritten, which `take_over` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

MANIFEST = "retro-kernels.json"
_GROUP = "__grp__"  # of Triton's files, those that name the others of their entry


def identity() -> dict[str, str]:
    """What a compiled kernel's key depends on, apart from the kernel's own arguments."""
    import triton
    from triton.runtime.cache import triton_key

    sources = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for path in sorted([*package.glob("ops/*/triton/*.py"), *package.glob("triton_lib/*.py")]):
        sources.update(path.read_bytes())
    return {
        "triton": triton.__version__,
        "python": platform.python_version().rpartition(".")[0],
        "compiler": hashlib.sha256(triton_key().encode()).hexdigest(),
        "kernels": sources.hexdigest(),
    }


def export(
    folder: Path,
    arches: Iterable[int],
    only: str | None = None,
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> int:
    """Compile what the published models launch for GPUs of `arches` into `folder`; how many launches that are. Goes on
    where it was interrupted. `only` selects kernels by a part of their name."""
    from . import aot

    folder.mkdir(parents=True, exist_ok=True)
    held, count = os.environ.get("TRITON_CACHE_DIR"), 0
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    try:
        for _ in aot.compile_each(arches, only, jobs=jobs):
            count += 1
            progress(count)
    finally:
        if held is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = held
    (folder / MANIFEST).write_text(json.dumps(identity(), indent=1))
    return count


def take_over(folder: str | os.PathLike) -> int:
    """Make what `export` left in `folder` part of this machine's Triton cache; how many kernels are there then."""
    import triton

    entries = _checked(Path(folder))
    for entry in entries:
        _copied(entry, Path(triton.knobs.cache.dir) / entry.name)
    return sum(1 for entry in entries if any(entry.glob("*.cubin")))


def _checked(folder: Path) -> list[Path]:
    """The entries of a folder that fits this machine."""
    try:
        made = json.loads((folder / MANIFEST).read_text())
        said = f"triton {made['triton']} on Python {made['python']}"
        keys = made["compiler"], made["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"cache: expected a folder that `retro-bench compile --presets --output` made; got {folder} ({error})"
        ) from error
    here = identity()
    if keys[0] != here["compiler"]:
        raise ValueError(
            f"cache: expected kernels compiled by triton {here['triton']} on Python {here['python']}, as here; got a "
            f"folder of {said}"
        )
    if keys[1] != here["kernels"]:
        raise ValueError("cache: expected kernels of this version of retro_kernels; got a folder of another's")
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())


def _copied(entry: Path, target: Path) -> None:
    """An entry of Triton's cache in another place, whole or not at all as far as Triton can tell: what names the other
    files comes last."""
    files = sorted((file for file in entry.iterdir() if file.is_file()), key=lambda file: file.name.startswith(_GROUP))
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        new = target / f"{file.name}.{uuid.uuid4().hex}"
        if file.name.startswith(_GROUP):
            children = json.loads(file.read_text())["child_paths"]
            new.write_text(json.dumps({"child_paths": {name: str(target / name) for name in children}}))
        else:
            shutil.copyfile(file, new)
        new.replace(target / file.name)
