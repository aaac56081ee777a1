"""Training state on disk. A resumed run equals the uninterrupted one, and any number of processes may resume it.

A checkpoint is a folder of `state.json` (step, position in the data, configuration, the optimiser's options, digests)
and of the folder of shards that it names. `torch.distributed.checkpoint` writes the shards as safetensors, one file per
process, so no process holds the whole model, and no file holds code.

A save writes a new folder of shards, then replaces `state.json` in one atomic step, then removes the old shards.
Therefore a kill at any moment leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retro_model.base import checks, disk

from . import processes

__all__ = ["CheckpointError", "load", "read_state", "save"]
FORMAT, STATE, LOCK = 3, "state.json", ".lock"
SHARDS = re.compile(r"shards-[0-9a-f]{32}")
JSON_TYPES = (int, float, bool, str, tuple, list, type(None))


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or a path cannot take one. The message names the file and its fault."""


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

    step: optimiser steps done. position: batches taken from the stream. extra: values for JSON. The model's `config`
    and the states of the random generators are saved too.

    Returns: the path.

    Raises:
        CheckpointError: `path` is neither free, nor an empty folder, nor a checkpoint. Nothing is changed then.
        retro_model.base.disk.Busy: another process is saving there. OSError: the disk is full.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    for name, value in {"step": step, "position": position}.items():
        checks.integer(name, value, low=0)
    path = Path(path)
    moments, groups = ({}, None) if optimizer is None else _optimizer_tensors(model, optimizer)
    tensors = _model_tensors(model) | moments
    tensors |= {name: generator.get_state() for name, generator in _generators().items()}
    config = getattr(getattr(model, "module", model), "config", None)
    state = {"step": step, "position": position, "extra": extra or {}, "optimizer": groups, "format": FORMAT}
    state |= {"config": config.to_dict() if hasattr(config, "to_dict") else None, "processes": processes.count()}
    lock: list[disk.Lock] = []
    processes.first(lambda: lock.append(_begin(path)))
    try:
        shards = path / processes.first(lambda: f"shards-{uuid.uuid4().hex}")
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        try:
            with _quiet():
                writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
                save(whole, storage_writer=writer, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # a BaseException: `except Exception` of a caller would miss it
            raise OSError(f"{path} cannot be saved: {next(iter(error.failures.values()))[0]}") from error
        state |= {"shards": shards.name, "files": _digests(shards)}
        processes.first(_finish, path, state)
    except BaseException:
        if lock:
            _remove_leftovers(path)
        raise
    finally:
        for held in lock:
            held.release()
    return path


def load(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Load a checkpoint into `model` in place; with an optimiser, into it and the random generators too.

    Each process reads the part that it holds. The number of processes and the sharding may differ from the
    save. The random generators are restored only if the number of processes is the same. Digests, the names, shapes and
    types of the model's tensors and the optimiser's options are checked before anything is changed.

    Returns: the fields of `state.json`: step, position, config, extra.
    Raises: CheckpointError naming the file and its fault: missing, truncated, corrupt, of another shape or type.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    path = Path(path)
    state = read_state(path)
    shards, targets, options = path / state["shards"], _model_tensors(model), []
    if optimizer is not None and state["optimizer"] is None:
        raise CheckpointError(f"{path} was saved without an optimiser")
    try:
        _check_files(shards, state["files"])
        reader = HuggingFaceStorageReader(str(shards))
        entries = reader.read_metadata().state_dict_metadata
        saved = {name: (entry.properties.dtype, entry.size) for name, entry in entries.items()}
        _check_model(shards, saved, targets)
        wanted = {name: torch.empty_like(target) for name, target in targets.items()}
        if optimizer is not None:
            options = _saved_options(path / STATE, state["optimizer"], model, optimizer)
            wanted |= _empty_moments(saved, model, optimizer, options)
            if state["processes"] == processes.count():  # A generator without a saved state keeps its own.
                wanted |= {name: generator.get_state() for name, generator in _generators().items() if name in saved}
        with _quiet():
            load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
        for name, generator in _generators().items():
            if name in wanted:
                generator.set_state(wanted[name])
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is a BaseException
        raise CheckpointError(f"{shards} cannot be read: {error}") from error
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(wanted[name])
    if optimizer is not None:
        names = _names(model)
        for group, changed in zip(optimizer.param_groups, options):
            group.update(changed)
            for p in group["params"]:
                optimizer.state[p] = _of_parameter(wanted, names[id(p)])
    return state


def read_state(path: str | os.PathLike) -> dict:
    """Return the fields of `state.json`: step, position, config, extra.

    Raises: CheckpointError naming the file that is missing, truncated or changed.
    """
    file = Path(path) / STATE
    try:
        state = disk.read_json(disk.read_plain(file))
        form = state.get("format", "none")
        if form == FORMAT and state.pop("sha256", None) != _digest(state):
            raise ValueError("its SHA-256 differs from the one in it")
    except OSError:
        raise CheckpointError(f"{file} is missing: not a checkpoint") from None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from None
    if form != FORMAT:
        raise CheckpointError(f"{file}: expected format {FORMAT}; got {form!r}, of another version")
    shards = Path(path) / state["shards"]
    if not SHARDS.fullmatch(state["shards"]) or shards.is_symlink() or not shards.is_dir():
        raise CheckpointError(f"{file}: the folder of shards {state['shards']!r} is missing or a link")
    return state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that hides torch's warning about a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        yield


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): _plain(name) for name, p in model.named_parameters()}


def _plain(name: str) -> str:
    """Return a parameter's name without the prefixes of DDP and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name. A tensor of several names has the first of them."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    persistent = {_plain(name) for name in model.state_dict()}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if _plain(name) in persistent:
            tensors.setdefault(id(tensor), (f"model.{_plain(name)}", tensor))
    return dict(tensors.values())


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict]]:
    """Return the moments by parameter name, and the options of each parameter group for JSON."""
    names, tensors, groups = _names(model), {}, []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and isinstance(v, JSON_TYPES)}
        groups.append({"options": options, "parameters": [names[id(p)] for p in group["params"]]})
        for p in group["params"]:
            tensors |= {f"optimizer.{names[id(p)]}.{k}": v for k, v in optimizer.state.get(p, {}).items()}
    return tensors, groups


def _of_parameter(tensors: dict, name: str) -> dict:
    """Return the moments of one parameter by their own names."""
    prefix = f"optimizer.{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _generators() -> dict[str, torch.Generator]:
    """Return this process's random generators by the names of their states in a checkpoint."""
    found = {f"random.{processes.rank()}.cpu": torch.default_generator}
    if torch.cuda.is_available():
        torch.cuda.init()
        every = enumerate(torch.cuda.default_generators)
        found |= {f"random.{processes.rank()}.cuda{i}": generator for i, generator in every}
    return found


def _begin(path: Path) -> disk.Lock:
    """Make the folder, lock it and remove the shards that killed saves left. Return the lock."""
    if (path.is_symlink() or path.exists()) and not path.is_dir():
        raise CheckpointError(f"{path}: expected a folder, or nothing; got a file or a broken link")
    if path.is_dir():
        names = {p.name for p in path.iterdir()} - {LOCK, STATE, f"{STATE}.new"}
        foreign = sorted(name for name in names if not SHARDS.fullmatch(name))
        if foreign and not (path / STATE).exists():
            why = f"it holds {foreign[0]}"
            raise CheckpointError(f"{path} is no checkpoint ({why}): save to another name, or empty it")
    disk.make_folder(path)
    lock = disk.Lock(path / LOCK, f"{path} is being saved")
    try:
        _remove_leftovers(path)  # It refuses a checkpoint of another version.
    except BaseException:
        lock.release()
        raise
    return lock


def _remove_leftovers(path: Path) -> None:
    """Remove shards that `state.json` does not name. The caller holds the lock."""
    kept = read_state(path)["shards"] if (path / STATE).exists() else None
    for old in list(path.iterdir()):
        if SHARDS.fullmatch(old.name) and old.name != kept:
            disk.remove(old)


def _finish(path: Path, state: dict) -> None:
    """Sync the new shards, then name them in `state.json`, then remove the old ones."""
    for file in (path / state["shards"]).iterdir():
        disk.sync(file)
    disk.sync(path / state["shards"])
    disk.sync(path)
    disk.write_json(path / STATE, state | {"sha256": _digest(state)})
    _remove_leftovers(path)


def _digest(state: dict) -> str:
    """Return the digest of the fields of `state.json`, as JSON reads them back."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of all files. Every process must call; each one computes its share."""
    if dist.is_initialized():
        dist.barrier()
    mine = sorted(folder.iterdir())[processes.rank() :: processes.count()]
    plain = {file.name: disk.sha256_of(file) for file in mine if file.is_file() and not file.is_symlink()}
    return {name: digest for part in processes.gathered(plain) for name, digest in part.items()}


def _check_files(folder: Path, wanted: dict) -> None:
    """Raise CheckpointError in every process unless the folder has these files, with these digests."""
    digests = _digests(folder)
    if wrong := sorted(name for name in wanted.keys() | digests.keys() if digests.get(name) != wanted.get(name)):
        why = f"its SHA-256 differs from the one in {STATE}"
        raise CheckpointError(f"{folder / wrong[0]} is missing, truncated, corrupt or of another save: {why}")


def _check_model(place: Path, saved: dict[str, tuple], targets: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the saved tensors of the model have the names, types and shapes of the targets."""
    got = {name: _form(*form) for name, form in saved.items() if name.startswith("model.")}
    want = {name: _form(target.dtype, target.shape) for name, target in targets.items()}
    for name in sorted(got.keys() | want.keys()):
        have, need = got.get(name, "absent"), want.get(name, "none")
        if have != need:
            raise CheckpointError(f"{place}: {name.removeprefix('model.')} is {have}, the model has {need}")


def _form(dtype: torch.dtype, size) -> str:
    """Return type and shape as an error prints them."""
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"


def _saved_options(file: Path, groups: list, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the saved options for each group of the optimiser, whose groups may be cut in another way."""
    saved = {name: group["options"] for group in groups for name in group["parameters"]}
    names, found = _names(model), []
    mine = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    if other := sorted(mine ^ saved.keys()):
        whose = "the optimiser" if other[0] in mine else "the checkpoint"
        raise CheckpointError(f"{file}: {other[0]} is a parameter of {whose} alone")
    for number, group in enumerate(optimizer.param_groups):
        options = [saved[names[id(p)]] for p in group["params"]] or [{}]
        if any(one != options[0] for one in options):
            raise CheckpointError(f"{file}: the parameters of the optimiser's group {number} have different options")
        if unknown := sorted(options[0].keys() - (group.keys() - {"params"})):
            raise CheckpointError(f"{file}: group {number}'s {unknown[0]} is no option of the optimiser")
        # JSON has lists for tuples
        found.append({k: tuple(v) if isinstance(group[k], tuple) else v for k, v in options[0].items()})
    return found


def _empty_moments(
    saved: dict[str, tuple], model: nn.Module, optimizer: torch.optim.Optimizer, options: list[dict]
) -> dict[str, Tensor]:
    """Return tensors for the saved moments. One of its parameter's shape has the parameter's sharding and device.

    saved: type and shape of every saved tensor.
    """
    names, wanted = _names(model), {}
    for group, changed in zip(optimizer.param_groups, options):
        on_device = {**group, **changed}
        on_device = on_device.get("fused") or on_device.get("capturable")
        for p in group["params"]:
            for key, (dtype, size) in _of_parameter(saved, names[id(p)]).items():
                if size == p.shape:
                    moment = torch.empty_like(p, dtype=dtype, requires_grad=False)
                else:  # a count of steps, which is on the CPU, or a factor
                    moment = torch.empty(size, dtype=dtype, device=p.device if size or on_device else "cpu")
                wanted[f"optimizer.{names[id(p)]}.{key}"] = moment
    return wanted
