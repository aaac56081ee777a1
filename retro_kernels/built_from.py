"""Which sources each extension was built from, and by which compiler.

csrc/built_from.cpp stores both as text in every library. This module reads the text from the file, so that it can also
describe a library that does not load. tools/build_extensions.py runs this file by its path, before the package can be
imported. Therefore it imports the standard library only.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Extension -> the folders of csrc that it is built from. The files directly in csrc belong to every extension.
FOLDERS = {"retro_kernels._cpu": ("cpu",), "retro_kernels._cuda": ("cuda",), "retro_model._text": ("text", "cpu")}
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
STAMP = re.compile(rb"retro-built-from:([0-9a-f]{12}) ([^\0]*)\0")


def digest(name: str, root: Path = ROOT) -> str | None:
    """Return a digest of the sources of extension `name` in a checkout, or None if `root` has no sources."""
    csrc = root / "csrc"
    paths = [path for folder in (".", *FOLDERS[name]) for path in (csrc / folder).glob("*") if path.suffix in SUFFIXES]
    if not paths:
        return None
    found = hashlib.sha256()
    for path in sorted(paths):
        contents = path.read_bytes()
        found.update(f"{path.relative_to(csrc).as_posix()}\0{len(contents)}\0".encode() + contents)
    return found.hexdigest()[:12]


def stamp(library: Path) -> tuple[str, str] | None:
    """Return the digest of the sources and the compiler of a library, or None if it does not state them."""
    found = STAMP.search(library.read_bytes())
    return (found[1].decode(), found[2].decode(errors="replace")) if found else None


def lines(root: Path = ROOT) -> list[str]:
    """Return one line per extension for the report of `retro_kernels.info`."""
    return [f"{name}: {_described(name, root)}" for name in FOLDERS]


def _described(name: str, root: Path) -> str:
    library = root / (name.replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX"))
    if not library.exists():
        return "not built"
    sources, stated = digest(name, root), stamp(library)
    if stated is None:
        text = "does not state its sources"
    else:
        text = f"built from sources {stated[0]} by {stated[1]}"
    if sources is None:
        return text
    if stated and stated[0] == sources:
        return f"{text}; this checkout has the same sources"
    return f"{text}; this checkout has other sources ({sources}), run `make build`"
