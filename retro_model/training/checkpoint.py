"""Training state on disk: safetensors for tensors, a small JSON for the rest; resuming repeats the uninterrupted run.

A checkpoint is a folder: `model.safetensors`, `optimizer.safetensors` (moments by parameter name, and the random generators'
states of every process) and `state.json` (step, position in the data, configuration, and each file's digest, its own too). It is written beside its place and
renamed, so that a folder under the final name is always whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, with the file and what is wrong with it."""


def _plain(name: str) -> str:
    """A parameter's name without the prefixes of DDP and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _full(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy; sharded tensors are gathered (every process must call)."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().contiguous().clone()


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """`tensor` placed as `target` is: same device, same sharding."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)
    return tensor.to(target.device)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): _plain(n) for n, p in model.named_parameters()}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name, a tensor shared by several names once."""
    seen: dict[int, str] = {}
    tensors = {}
    persistent = {_plain(n) for n in model.state_dict()}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in seen and _plain(name) in persistent:
            seen[id(tensor)] = name
            tensors[_plain(name)] = tensor
    return tensors


def save(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int = 0,
         position: int = 0, extra: dict | None = None) -> Path:  # fmt: skip
    """Writes a checkpoint folder at `path`, replacing one that is there.

    step: optimiser steps done. position: batches taken from the stream. extra: anything JSON can hold; the model's
    configuration is kept where the model has one. In a process group every process calls, the first one writes.
    Returns: the path.
    """
    path = Path(path)
    tensors = {n: _full(t) for n, t in _model_tensors(model).items()}
    moments, groups = _optimizer_tensors(model, optimizer) if optimizer is not None else ({}, [])
    moments |= _random_states()
    config = getattr(getattr(model, "module", model), "config", None)
    state = {"format": FORMAT, "step": step, "position": position, "optimizer": groups, "extra": extra or {},
             "config": config.to_dict() if hasattr(config, "to_dict") else None}  # fmt: skip
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
        return path
    _write(path, dict(zip(FILES, (tensors, moments))), state)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return path


def _random_states() -> dict[str, Tensor]:
    """The random generators' states of every process (every process must call): each drops other activations."""
    mine = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        mine |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    every = [mine]
    if torch.distributed.is_initialized():
        every = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, mine)
    return {_random_name(rank, device): state for rank, states in enumerate(every) for device, state in states.items()}


def _random_name(rank: int, device: str) -> str:
    return f"random.{device}" if rank == 0 else f"random.{rank}.{device}"


def _set_random_states(moments: dict[str, Tensor]) -> None:
    """This process's, where as many processes with as many GPUs saved them; else the generators stay as they are."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if (state := moments.get(_random_name(rank, "cpu"))) is not None:
        torch.set_rng_state(state)
    devices = [name for i in range(torch.cuda.device_count()) if (name := _random_name(rank, f"cuda{i}")) in moments]
    if devices and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([moments[name] for name in devices])


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict]]:
    names = _names(model)
    tensors, groups = {}, []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and isinstance(v, (int, float, bool, str, tuple, list, type(None)))}
        groups.append({"options": options, "parameters": [names[id(p)] for p in group["params"]]})
        for p in group["params"]:
            tensors |= {f"state.{names[id(p)]}.{k}": _full(v) for k, v in optimizer.state.get(p, {}).items()}
    return tensors, groups


def _write(path: Path, files: dict[str, dict[str, Tensor]], state: dict) -> None:
    from safetensors.torch import save_file

    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        for name, tensors in files.items():
            save_file(tensors, fresh / name)
        state["files"] = {name: {"bytes": (fresh / name).stat().st_size, "sha256": _digest(fresh / name)} for name in files}
        state["sha256"] = _state_digest(state)
        (fresh / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        for name in [*files, "state.json"]:  # a rename must not reach the disk before the data it names
            with open(fresh / name, "rb") as f:
                os.fsync(f.fileno())
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            os.replace(path, old)  # a folder cannot be renamed onto one that is not empty
        os.replace(fresh, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _state_digest(state: dict) -> str:
    """Of everything in state.json but the digest itself, as JSON gives it back."""
    rest = json.loads(json.dumps({k: v for k, v in state.items() if k != "sha256"}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_state(path: str | os.PathLike) -> dict:
    """The JSON part of a checkpoint: step, position, config, extra.

    Raises: CheckpointError naming the file that is missing, truncated or changed.
    """
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in state["files"].items()}
        if "sha256" in state and state.pop("sha256") != _state_digest(state):  # the first checkpoints have none
            raise ValueError("its SHA-256 differs from the one in it")
    except FileNotFoundError:
        raise CheckpointError(f"{path / 'state.json'} is missing: not a checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / 'state.json'} is corrupt: {error}") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'state.json'} has format {state.get('format')!r}, expected {FORMAT}")
    for name in FILES:
        file, want = path / name, listed.get(name)
        if want is None or not file.exists():
            raise CheckpointError(f"{file} is missing")
        size, digest = want
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} is truncated or overwritten: {file.stat().st_size} bytes, expected {size}")
        if _digest(file) != digest:
            raise CheckpointError(f"{file} is corrupt: its SHA-256 differs from the one in state.json")
    return state


def load(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Puts a checkpoint back into `model` (and `optimizer` and the random generators, where one is given), in place.

    Everything is checked before anything is changed.
    Returns: the JSON part: step, position, config, extra.
    Raises: CheckpointError naming the file, and what is missing, truncated, corrupt or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    state = read_state(path)
    try:
        tensors, moments = (load_file(path / name) for name in FILES)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    targets = _model_tensors(model)
    _check(path / FILES[0], {n: tuple(t.shape) for n, t in tensors.items()}, {n: tuple(t.shape) for n, t in targets.items()})
    if optimizer is not None:
        _check_optimizer(path / FILES[1], state, model, optimizer)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(_like(tensors[name], target))
    if optimizer is not None:
        _load_optimizer(state, moments, model, optimizer)
        _set_random_states(moments)
    return state


def _check(file: Path, got: dict, want: dict) -> None:
    for name in sorted(got.keys() | want.keys()):
        if got.get(name) != want.get(name):
            raise CheckpointError(f"{file}: {name} is {got.get(name, 'absent')}, the model has {want.get(name, 'none')}")


def _check_optimizer(file: Path, state: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = _names(model)
    want = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if (got := [group["parameters"] for group in state["optimizer"]]) != want:
        raise CheckpointError(f"{file}: the optimiser's {len(want)} groups do not hold the parameters of the {len(got)} saved ones")


def _load_optimizer(state: dict, moments: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = _names(model)
    for group, saved in zip(optimizer.param_groups, state["optimizer"]):
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved["options"].items()})
        for p in group["params"]:
            prefix = f"state.{names[id(p)]}."
            mine = {k.removeprefix(prefix): v for k, v in moments.items() if k.startswith(prefix)}
            # `step` is a scalar that is never sharded; the moments are placed as their parameter is.
            optimizer.state[p] = {k: _like(v, p) if v.dim() or not p.dim() else v.to(p.device) for k, v in mine.items()}
