"""Checkpoints of which no process holds the whole: each writes its shards, another number of processes reads them.

In the folder: `state.json`, which names the folder of shards that counts, and that folder, in the format of
`torch.distributed.checkpoint`. A save writes a new folder of shards, then replaces `state.json` in one step, then
removes the old folder: a kill at any moment leaves the old checkpoint or the new one. The one-file form is
`checkpoint`.
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

from .checkpoint import first_process
from .checkpoint_folder import CheckpointError, read_state_file, state_digest

FORMAT = "sharded-2"
#: what state.json says
FIELDS = {
    "shards": str,
    "step": int,
    "position": int,
    "processes": int,
    "extra": dict,
    "files": dict,
    "optimizer": bool,
    "config": (dict, type(None)),
}
STATE = "state.json"
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
    """Writes a checkpoint folder at `path`, in place of the one that is there; every process calls, and writes what it
    holds.

    Arguments as `checkpoint.save`. The random generators' state of every process is kept for as many processes.

    Raises:
        CheckpointError: `path` holds something else than a sharded checkpoint.
        retro_model.base.disk.Busy: another process is saving there. OSError: the disk is full.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    path = Path(path)
    lock: list[disk.Lock] = []
    first_process(lambda: lock.append(_begin(path)))
    try:
        name = _agreed(f"shards-{uuid.uuid4().hex}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            writer = FileSystemWriter(path / name, single_file_per_rank=True)
            try:
                save(_tensors(model, optimizer), storage_writer=writer, no_dist=not dist.is_initialized())
            except CheckpointException as error:  # no Exception, so that nobody's handler would see it
                first_process(disk.remove, path / name)
                raise _saved_not(path, error) from error
        config = getattr(getattr(model, "module", model), "config", None)
        state = {
            "format": FORMAT,
            "shards": name,
            "step": step,
            "position": position,
            "extra": extra or {},
            "processes": _processes(),
            "files": _digests(path / name),
            "optimizer": optimizer is not None,
            "config": config.to_dict() if hasattr(config, "to_dict") else None,
        }
        first_process(_finish, path, state)
    finally:
        for held in lock:
            held.release()
    return path


def load(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Puts a checkpoint back into `model` (and `optimizer`), in place: each process reads what it holds now.

    The processes, their number and how the model is divided may be others than when it was saved. Code in the files is
    not run: only tensors, numbers and strings are read.

    Returns: step, position, config, extra.

    Raises:
        CheckpointError: naming the file that is missing or corrupt, or what another model has.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    from .untrusted_shards import Planner, Reader

    path = Path(path)
    state = read_state(path)
    if optimizer is not None and not state["optimizer"]:
        raise CheckpointError(f"{path} was saved without an optimiser")
    _check_files(path / state["shards"], state["files"])
    tensors = _tensors(model, optimizer, processes=state["processes"])
    reader = Reader(path / state["shards"], state["files"].keys())
    try:
        _check_forms(path, reader.read_metadata().state_dict_metadata, tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, planner=Planner(), no_dist=not dist.is_initialized())
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException, of this process or another, is no Exception
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
    """Step, position, configuration and the like. Raises: CheckpointError naming the file."""
    file = Path(path) / STATE
    try:
        state = disk.read_json(read_state_file(file))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: expected a checkpoint of format {FORMAT}; `checkpoint.load` reads the one-file form"
        )
    if state.pop("sha256", None) != state_digest(state):
        raise CheckpointError(f"{file} is corrupt: its SHA-256 differs from the one in it")
    for name, kind in FIELDS.items():
        if not isinstance(state.get(name, ...), kind) or (kind is int and (state[name] is True or state[name] < 0)):
            raise CheckpointError(f"{file} is corrupt: {name} is {state.get(name, 'missing')!r}")
    shards = Path(path) / state["shards"]
    if not SHARDS.fullmatch(state["shards"]) or shards.is_symlink() or not shards.is_dir():
        raise CheckpointError(f"{file}: the folder of shards {state['shards']!r} is missing or a link")
    return state


def _saved_not(path: Path, error) -> Exception:
    """Return the exception of the first process that failed, in place of torch's."""
    first = next(iter(error.failures.values()))[0]
    if isinstance(first, OSError):
        return OSError(first.errno, f"{path} cannot be saved: {first.strerror or first}")
    full = "no space left" in str(first).lower() or "unexpected pos" in str(first)  # as torch's zip writer says it
    return (
        OSError(errno.ENOSPC, f"{path} cannot be saved: {first}")
        if full
        else CheckpointError(f"{path} cannot be saved: {first}")
    )


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, processes: int | None = None) -> dict[str, Any]:
    """This process's part of what is saved; `processes`: how many saved, None: those that are now."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    # the groups of another number of processes are others
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer, options=by_name)
        if processes in (None, _processes()):
            rank = dist.get_rank() if dist.is_initialized() else 0
            tensors["random"] = {f"{rank}.cpu": torch.get_rng_state()}
            if torch.cuda.is_available():
                tensors["random"][f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of all files. Every process calls, and computes its part."""
    if dist.is_initialized():
        dist.barrier()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = {file.name: _digest_or_why_not(file) for file in sorted(folder.iterdir())[rank::size]}
    every = [mine]
    if dist.is_initialized():
        every = [None] * size
        dist.all_gather_object(every, mine)
    return {name: digests for part in every for name, digests in part.items()}


def _digest_or_why_not(file: Path) -> str:
    """A file's digest, or its error: an error raised in one process would leave the others waiting."""
    try:
        return disk.sha256_of(file)
    except (OSError, ValueError) as error:
        return str(error)


def _check_files(folder: Path, wanted: dict) -> None:
    """CheckpointError, in every process and before anything is loaded, unless each file has its digest."""
    digests = _digests(folder)
    for name in sorted(wanted.keys() | digests.keys()):
        if name not in digests or name not in wanted:
            raise CheckpointError(f"{folder / name} is {'missing' if name in wanted else 'none of the checkpoint'}")
        if digests[name] != wanted[name]:
            unread = "" if re.fullmatch("[0-9a-f]{64}", digests[name]) else f" ({digests[name]})"
            raise CheckpointError(
                f"{folder / name} is truncated or corrupt: its SHA-256 differs from the one in {STATE}{unread}"
            )


def _check_forms(path: Path, saved: dict, tensors: dict[str, Any]) -> None:
    """Each tensor of the model must be saved, in its shape, and no other."""
    own = {f"model.{name}": t for name, t in tensors["model"].items()}
    theirs = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    for name in sorted(own.keys() | theirs.keys()):
        got = list(theirs[name].size) if name in theirs else "absent"
        want = list(own[name].shape) if name in own else "none"
        if got != want:
            raise CheckpointError(f"{path}: {name.removeprefix('model.')} is {got}, the model has {want}")


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _agreed(name: str) -> str:
    """The name that the first process gives."""
    names = [name]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return names[0]


def _begin(path: Path) -> disk.Lock:
    """The folder, locked, without what killed saves left in it."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path} is there and no folder")
    disk.make_folder(path)
    lock = disk.Lock(path / ".lock", f"{path} is being saved")
    try:
        names = {p.name for p in path.iterdir()} - {".lock", STATE, f"{STATE}.new"}
        if foreign := sorted(name for name in names if not SHARDS.fullmatch(name)):
            raise CheckpointError(
                f"{path} is no sharded checkpoint (it holds {foreign[0]}): save to another name, or empty it"
            )
        kept = read_state(path)["shards"] if (path / STATE).exists() else None
        _remove_others(path, kept)
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
    _remove_others(path, state["shards"])


def _remove_others(path: Path, kept: str | None) -> None:
    for old in list(path.iterdir()):
        if SHARDS.fullmatch(old.name) and old.name != kept:
            disk.remove(old)
