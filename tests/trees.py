"""Copies of this tree, to plant faults in or to build with other options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("retro_kernels", "retro_model")
#: git needs an author and must not sign
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]


def commit(folder: Path) -> Path:
    """Make the folder a repository whose one commit has all of its files."""
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*GIT, "-C", str(folder), *command], check=True, capture_output=True)
    return folder


def names(tree: Path = ROOT) -> list[str]:
    """Return the files that git tracks or would not ignore, without links and deleted files."""
    listed = subprocess.run(
        ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in filter(None, listed.stdout.split("\0")) if (tree / name).is_file()]


def copy(to: Path, like: Path = ROOT, binaries: bool = True) -> Path:
    """Copy the files of `like` to `to`, with `binaries` its built extensions too; equal files are left alone."""
    for name in names(like):
        target = to / name
        contents = (like / name).read_bytes()
        if not target.exists() or target.read_bytes() != contents:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(contents)
    for package in PACKAGES if binaries else ():
        for binary in (like / package).glob("*.so"):
            shutil.copy2(binary, to / package)
    return to


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that occurs once in a file. Raises ValueError otherwise, as for an outdated fault."""
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{path.name}: expected {old!r} once; got {text.count(old)} of it")
    path.write_text(text.replace(old, new))


def build(tree: Path, isas: str, **flags: str) -> subprocess.CompletedProcess:
    """Build the extensions of a copy, for portable and these instruction sets. flags: settings for setup.py."""
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | {"RETRO_KERNELS_ISAS": f"portable,{isas}"} | flags,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
