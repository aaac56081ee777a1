"""A checkpoint's folder: a kill at any moment of a save leaves the old checkpoint or the new one, whole.

`state.json` names its two tensor files, whose names hold their digests. A save over a checkpoint puts the new tensor
files beside the old ones, then replaces `state.json` in one atomic step, then removes the old files. A first save
fills a folder beside its place and renames it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from retro_model.base import disk

FORMAT = 2
KINDS = ("model", "optimizer")
STATE, FRESH = "state.json", ".new"
TENSORS = re.compile(r"(model|optimizer)-[0-9a-f]{16}\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or a path cannot take one. The message names the file and its fault."""


def check_place(path: Path) -> None:
    """Raise CheckpointError unless `path` is free, an empty folder, a checkpoint or the rest of a killed save."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a folder, or nothing; got a file or a broken link")
    names = sorted(p.name for p in path.iterdir())
    foreign = [name for name in names if name not in (STATE, FRESH) and not TENSORS.fullmatch(name)]
    try:
        ours = not foreign or disk.read_json(disk.read_plain(path / STATE))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise CheckpointError(f"{path} is no checkpoint (it holds {foreign[0]}): save to another name, or empty it")


def write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict) -> None:
    """Write a checkpoint of tensors by kind and of `state`, to which files and digest are added."""
    path = Path(os.path.realpath(path))  # the lock of a folder is the same through every link
    disk.make_folder(path.parent)
    with disk.Lock(path.with_name(f".{path.name}.lock"), f"{path} is being saved"):
        check_place(path)
        there = path.is_dir()
        fresh = path / FRESH if there else path.with_name(f".{path.name}{FRESH}")
        disk.remove(fresh)
        try:
            os.mkdir(fresh)
            files = _fill(fresh, tensors, state)
            if there:
                for name in files:
                    os.replace(fresh / name, path / name)
                disk.sync(path)  # the names must not reach the disk after the state that names them
                os.replace(fresh / STATE, path / STATE)
                disk.sync(path)
            else:
                os.rename(fresh, path)
                disk.sync(path.parent)
        finally:
            disk.remove(fresh)
        remove_others(path, TENSORS, files)


def _fill(folder: Path, tensors: dict[str, dict[str, Tensor]], state: dict) -> dict:
    """Write and sync all files; return the state's entry of each tensor file."""
    from safetensors.torch import save_file

    files = {}
    for kind, content in tensors.items():
        written = folder / kind
        save_file(content, written)
        digest = disk.sha256_of(written)
        name = f"{kind}-{digest[:16]}.safetensors"
        files[name] = {"bytes": written.stat().st_size, "sha256": digest}
        disk.sync(written)
        os.rename(written, folder / name)
    whole = state | {"format": FORMAT, "files": files}
    disk.write_json(folder / STATE, whole | {"sha256": state_digest(whole)})
    return files


def remove_others(path: Path, names: re.Pattern, kept: Collection[str]) -> None:
    """Remove what has one of a save's names and is not kept. The caller holds the lock."""
    for old in list(path.iterdir()):
        if names.fullmatch(old.name) and old.name not in kept:
            disk.remove(old)


def state_digest(state: dict) -> str:
    """Return the digest of state.json's fields but the digest itself, as JSON reads them back."""
    rest = json.loads(json.dumps({k: v for k, v in state.items() if k != "sha256"}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read(path: Path, use: Callable[[dict, dict[str, Path]], Any]) -> Any:
    """Return use(state, files by kind) of a checkpoint whose digests are right; repeat if a save replaces it."""
    while True:
        text = read_state_file(path / STATE)
        try:
            state = _parsed(path, text)
            return use(state, _files(path, state))
        except (CheckpointError, FileNotFoundError):
            if not (path / STATE).exists() or read_state_file(path / STATE) == text:
                raise


def read_state_file(file: Path) -> bytes:
    """Return the content of a `state.json`. Raises: CheckpointError naming the file."""
    try:
        return disk.read_plain(file)
    except OSError:
        raise CheckpointError(f"{file} is missing: not a checkpoint") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _parsed(path: Path, text: bytes) -> dict:
    try:
        state = disk.read_json(text)
        if (form := state["format"]) == FORMAT:
            if state.pop("sha256", None) != state_digest(state):
                raise ValueError("its SHA-256 differs from the one in it")
            _check_types(state)
            return state
    except KeyError as error:
        raise CheckpointError(f"{path / STATE} is corrupt: {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / STATE} is corrupt: {error}") from None
    raise CheckpointError(f"{path / STATE}: expected format {FORMAT}; got {form!r}, of another version")


def _check_types(state: dict) -> None:
    """Raise ValueError for a field of another type."""
    files, groups, config = state["files"].values(), state["optimizer"], state["config"]
    typed = all(isinstance(file["bytes"], int) and isinstance(file["sha256"], str) for file in files)
    counts = {name: type(state[name]) is int and state[name] >= 0 for name in ("step", "position")}
    named = all(isinstance(name, str) for group in groups for name in group["parameters"])
    for holds, fault in (
        (typed, "files has bytes or a digest of another type"),
        (counts["step"], "step is no count"),
        (counts["position"], "position is no count"),
        (isinstance(state["extra"], dict), "extra is no object"),
        (config is None or isinstance(config, dict), "config is no object"),
        (all(isinstance(group["options"], dict) for group in groups), "an optimiser group's options are no object"),
        (named, "an optimiser group's parameters are no names"),
    ):
        if not holds:
            raise ValueError(fault)


def _files(path: Path, state: dict) -> dict[str, Path]:
    """Return the tensor files by kind. Only names that a save gives count, so no state points out of its folder."""
    files = {}
    for kind in KINDS:
        names = [name for name in state["files"] if (match := TENSORS.fullmatch(name)) and match[1] == kind]
        if len(names) != 1 or not (path / names[0]).is_file():  # a pipe would never end
            raise CheckpointError(f"{path / (names[0] if names else kind + '.safetensors')} is missing")
        file, want = path / names[0], state["files"][names[0]]
        if (size := file.stat().st_size) != want["bytes"]:
            raise CheckpointError(f"{file} is truncated or overwritten: {size} bytes, expected {want['bytes']}")
        if disk.sha256_of(file) != want["sha256"]:
            raise CheckpointError(f"{file} is corrupt: its SHA-256 differs from the one in {STATE}")
        files[kind] = file
    return files
