"""Checkpoints of which no process holds the whole: each process writes its shards. Any number of processes reads them.

A checkpoint's folder holds `state.json` and the folder of shards that it names, in the format of
`torch.distributed.checkpoint`. A save writes a new folder of shards, then replaces `state.json` in one atomic step,
then removes the old shards: a kill at any moment leaves the old checkpoint or the new one. `checkpoint`: in one file.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from retro_model.base import disk

from . import processes
from .checkpoint import state_of
from .checkpoint_folder import STATE, CheckpointError, read_state_file, remove_others, state_digest

FORMAT = "sharded-2"
#: field of state.json -> its type
FIELDS = {"shards": str, "extra": dict, "files": dict, "optimizer": bool, "config": (dict, type(None))}
FIELDS |= dict.fromkeys(("step", "position", "processes"), int)
SHARDS = re.compile(r"shards-[0-9a-f]{32}")


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    position: int = 0,
    extra: dict | None = None,
) -> Path:
    """Write a checkpoint folder at `path`, replacing a checkpoint that is there. Every process must call.

    Arguments as of `checkpoint.save`. The random generators' states are loaded again by as many processes only.

    Raises:
        CheckpointError: `path` holds something else than a sharded checkpoint.
        retro_model.base.disk.Busy: another process is saving there. OSError: the disk is full.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    path = Path(path)
    lock: list[disk.Lock] = []
    processes.first(lambda: lock.append(_begin(path)))
    try:
        name = processes.first(lambda: f"shards-{uuid.uuid4().hex}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            writer = FileSystemWriter(path / name, single_file_per_rank=True)
            try:
                save(_tensors(model, optimizer), storage_writer=writer, no_dist=not dist.is_initialized())
            except CheckpointException as error:  # a BaseException: `except Exception` of a caller would miss it
                processes.first(disk.remove, path / name)
                raise _save_error(path, error) from error
        state = state_of(model, step, position, extra) | {"format": FORMAT, "shards": name}
        state |= {"processes": processes.count(), "files": _digests(path / name), "optimizer": optimizer is not None}
        processes.first(_finish, path, state)
    finally:
        for held in lock:
            held.release()
    return path


def load(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Load a checkpoint into `model` (and `optimizer`) in place. Each process reads the part that it holds.

    The number of processes and the model's sharding may differ from those of the save. Only tensors, numbers and
    strings are read: no code in the files runs.

    Returns: step, position, config, extra.

    Raises:
        CheckpointError: naming the file that is missing or corrupt, or the tensor that the model has in another shape.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    from .untrusted_shards import Planner, Reader

    path = Path(path)
    state = read_state(path)
    if optimizer is not None and not state["optimizer"]:
        raise CheckpointError(f"{path} was saved without an optimiser")
    _check_files(path / state["shards"], state["files"])
    tensors = _tensors(model, optimizer, saved_by=state["processes"])
    reader = Reader(path / state["shards"], state["files"].keys())
    try:
        _check_forms(path, reader.read_metadata().state_dict_metadata, tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, planner=Planner(), no_dist=not dist.is_initialized())
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is a BaseException
        raise CheckpointError(f"{path / state['shards']} cannot be read: {error}") from error
    options = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
    set_model_state_dict(model, tensors["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=options)
    for name, generator in tensors.get("random", {}).items():
        if name.endswith("cpu"):
            torch.set_rng_state(generator)
        else:
            torch.cuda.set_rng_state(generator)
    return state


def read_state(path: str | os.PathLike) -> dict:
    """Return the fields of `state.json`. Raises: CheckpointError naming the file."""
    file = Path(path) / STATE
    content = read_state_file(file)
    try:
        state = disk.read_json(content)
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        want = f"a checkpoint of format {FORMAT}"
        raise CheckpointError(f"{file}: expected {want}; `checkpoint.load` reads the one-file form")
    if state.pop("sha256", None) != state_digest(state):
        raise CheckpointError(f"{file} is corrupt: its SHA-256 differs from the one in it")
    for name, kind in FIELDS.items():
        if not isinstance(state.get(name, ...), kind) or (kind is int and (state[name] is True or state[name] < 0)):
            raise CheckpointError(f"{file} is corrupt: {name} is {state.get(name, 'missing')!r}")
    shards = Path(path) / state["shards"]
    if not SHARDS.fullmatch(state["shards"]) or shards.is_symlink() or not shards.is_dir():
        raise CheckpointError(f"{file}: the folder of shards {state['shards']!r} is missing or a link")
    return state


def _save_error(path: Path, error) -> Exception:
    """Return the exception of the first process that failed, in place of torch's."""
    first = next(iter(error.failures.values()))[0]
    if isinstance(first, OSError):
        return OSError(first.errno, f"{path} cannot be saved: {first.strerror or first}")
    message = f"{path} cannot be saved: {first}"
    full = "no space left" in str(first).lower() or "unexpected pos" in str(first)  # errors of torch's zip writer
    return OSError(errno.ENOSPC, message) if full else CheckpointError(message)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, saved_by: int | None = None) -> dict[str, Any]:
    """Return this process's part of a checkpoint. saved_by: number of processes of the save; None: this one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    # by name: another number of processes has other parameter groups
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer, options=by_name)
        if saved_by in (None, processes.count()):
            rank = processes.rank()
            tensors["random"] = {f"{rank}.cpu": torch.get_rng_state()}
            if torch.cuda.is_available():
                tensors["random"][f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of all files. Every process must call; each computes its share.

    An unreadable file has its error in place of a digest: raised in one process, it would leave the others waiting.
    """
    if dist.is_initialized():
        dist.barrier()
    mine = {}
    for file in sorted(folder.iterdir())[processes.rank() :: processes.count()]:
        try:
            mine[file.name] = disk.sha256_of(file)
        except (OSError, ValueError) as error:
            mine[file.name] = str(error)
    return {name: digest for part in processes.gathered(mine) for name, digest in part.items()}


def _check_files(folder: Path, wanted: dict) -> None:
    """Raise CheckpointError in every process unless each file has its digest."""
    digests = _digests(folder)
    for name in sorted(wanted.keys() | digests.keys()):
        if name not in digests or name not in wanted:
            raise CheckpointError(f"{folder / name} is {'missing' if name in wanted else 'none of the checkpoint'}")
        if digests[name] != wanted[name]:
            unread = "" if re.fullmatch("[0-9a-f]{64}", digests[name]) else f" ({digests[name]})"
            why = f"its SHA-256 differs from the one in {STATE}{unread}"
            raise CheckpointError(f"{folder / name} is truncated or corrupt: {why}")


def _check_forms(path: Path, saved: dict, tensors: dict[str, Any]) -> None:
    """Raise CheckpointError unless the saved tensors have the names and shapes of the model's."""
    own = {f"model.{name}": t for name, t in tensors["model"].items()}
    theirs = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    for name in sorted(own.keys() | theirs.keys()):
        got = list(theirs[name].size) if name in theirs else "absent"
        want = list(own[name].shape) if name in own else "none"
        if got != want:
            raise CheckpointError(f"{path}: {name.removeprefix('model.')} is {got}, the model has {want}")


def _begin(path: Path) -> disk.Lock:
    """Make the folder, lock it and remove the shards that killed saves left; return the lock."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path}: expected a folder, or nothing; got a file or a link")
    disk.make_folder(path)
    lock = disk.Lock(path / ".lock", f"{path} is being saved")
    try:
        names = {p.name for p in path.iterdir()} - {".lock", STATE, f"{STATE}.new"}
        if foreign := sorted(name for name in names if not SHARDS.fullmatch(name)):
            why = f"no sharded checkpoint (it holds {foreign[0]})"
            raise CheckpointError(f"{path} is {why}: save to another name, or empty it")
        remove_others(path, SHARDS, [read_state(path)["shards"]] if (path / STATE).exists() else [])
    except BaseException:
        lock.release()
        raise
    return lock


def _finish(path: Path, state: dict) -> None:
    """Sync the new shards, then name them in state.json, then remove the old ones."""
    for file in (path / state["shards"]).iterdir():
        disk.sync(file)
    disk.sync(path / state["shards"])
    disk.sync(path)
    disk.write_json(path / STATE, state | {"sha256": state_digest(state)})
    remove_others(path, SHARDS, [state["shards"]])
