"""Training state on disk: safetensors for tensors, JSON for the rest. A resumed run equals the uninterrupted one.

A checkpoint is a folder of three files: the model's tensors; the optimiser's moments by parameter name, with the random
generators' states of every process; and `state.json` with step, position in the data, configuration and digests. A kill
at any moment leaves the old checkpoint or the new one: see `checkpoint_folder`.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from . import processes
from .checkpoint_folder import CheckpointError, check_place, read, write

__all__ = ["CheckpointError", "load", "read_state", "save"]
RANDOM = re.compile(r"random(\.\d+)?\.(cpu|cuda\d+)")
JSON_TYPES = (int, float, bool, str, tuple, list, type(None))


def _plain(name: str) -> str:
    """Return a parameter's name without the prefixes of DDP and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _full(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU copy. Sharded tensors are gathered: every process must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().contiguous().clone()


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return `tensor` on the device and in the sharding of `target`."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)
    return tensor.to(target.device)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): _plain(n) for n, p in model.named_parameters()}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by plain name, a tensor of several names under the first of them."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    persistent = {_plain(n) for n in model.state_dict()}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if _plain(name) in persistent:
            tensors.setdefault(id(tensor), (_plain(name), tensor))
    return dict(tensors.values())


def state_of(model: nn.Module, step: int, position: int, extra: dict | None) -> dict:
    """Return the fields of `state.json` that both forms of checkpoint share."""
    config = getattr(getattr(model, "module", model), "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else None
    return {"step": step, "position": position, "extra": extra or {}, "config": config}


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    position: int = 0,
    extra: dict | None = None,
) -> Path:
    """Write a checkpoint folder at `path`, replacing a checkpoint that is there.

    step: optimiser steps done. position: batches taken from the stream. extra: values for JSON. A model's `config` is
    saved too. In a process group every process must call; the first one writes.
    Returns: the path.
    Raises: CheckpointError if `path` is neither a checkpoint nor an empty folder; nothing is changed then.
        retro_model.base.disk.Busy if another process is saving there.
    """
    path = Path(path)
    processes.first(check_place, path)
    tensors = {n: _full(t) for n, t in _model_tensors(model).items()}
    moments, groups = _optimizer_tensors(model, optimizer) if optimizer is not None else ({}, [])
    for states in processes.gathered({name: generator.get_state() for name, generator in _generators().items()}):
        moments |= states
    state = state_of(model, step, position, extra) | {"optimizer": groups}
    processes.first(write, path, {"model": tensors, "optimizer": moments}, state)
    return path


def _generators() -> dict[str, torch.Generator]:
    """Return this process's random generators by the names of their states in a checkpoint."""
    prefix = "random." if processes.rank() == 0 else f"random.{processes.rank()}."
    found = {f"{prefix}cpu": torch.default_generator}
    if torch.cuda.is_available():
        torch.cuda.init()
        found |= {f"{prefix}cuda{i}": generator for i, generator in enumerate(torch.cuda.default_generators)}
    return found


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict]]:
    names = _names(model)
    tensors, groups = {}, []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and isinstance(v, JSON_TYPES)}
        groups.append({"options": options, "parameters": [names[id(p)] for p in group["params"]]})
        for p in group["params"]:
            tensors |= {f"state.{names[id(p)]}.{k}": _full(v) for k, v in optimizer.state.get(p, {}).items()}
    return tensors, groups


def read_state(path: str | os.PathLike) -> dict:
    """Return the JSON part of a checkpoint: step, position, config, extra.

    Raises: CheckpointError naming the file that is missing, truncated or changed.
    """
    return read(Path(path), lambda state, files: state)


def load(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Load a checkpoint into `model` in place; with an optimiser, into it and the random generators too.

    Everything is checked before anything is changed: names, shapes and types of the tensors, the optimiser's options
    and moments, the generators' states.
    Returns: the JSON part: step, position, config, extra.
    Raises: CheckpointError naming the file and its fault: missing, truncated, corrupt, of another shape or type.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state, files, tensors, moments = read(
            Path(path), lambda state, files: (state, files, load_file(files["model"]), load_file(files["optimizer"]))
        )
    except SafetensorError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    targets = _model_tensors(model)
    _check_equal(files["model"], "the model", _forms(tensors), _forms(targets))
    if optimizer is not None:
        _check_optimizer(files["optimizer"], state, moments, model, optimizer)
        _check_random_states(files["optimizer"], moments)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(_like(tensors[name], target))
    if optimizer is not None:
        _load_optimizer(state, moments, model, optimizer)
        for name, generator in _generators().items():  # a generator without a saved state is left alone
            if name in moments:
                generator.set_state(moments[name])
    return state


def _form(tensor: Tensor) -> str:
    """Return type and shape as an error prints them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _forms(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: _form(tensor) for name, tensor in tensors.items()}


def _check_equal(file: Path, whose: str, got: dict[str, str], want: dict[str, str], prefix: str = "") -> None:
    for name in sorted(got.keys() | want.keys()):
        have, need = got.get(name, "absent"), want.get(name, "none")
        if have != need:
            raise CheckpointError(f"{file}: {prefix}{name} is {have}, {whose} has {need}")


def _check_optimizer(
    file: Path, state: dict, moments: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names = _names(model)
    want = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if (got := [group["parameters"] for group in state["optimizer"]]) != want:
        why = f"do not hold the parameters of the {len(got)} saved ones"
        raise CheckpointError(f"{file}: the optimiser's {len(want)} groups {why}")
    made: dict[tuple, dict[str, str]] = {}
    known = set()
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state["optimizer"])):
        for name, value in saved["options"].items():
            _check_option(file, f"group {number}'s {name}", value, group.get(name, _MISSING))
        for p in group["params"]:
            mine = _of_parameter(moments, names[id(p)])
            known |= {f"state.{names[id(p)]}.{k}" for k in mine}
            key = (number, p.shape, p.dtype, p.device)
            if mine and key not in made:
                made[key] = _moments_of(file, optimizer, {**group, **_options(group, saved)}, p)
            _check_equal(file, "the optimiser", _forms(mine), made[key] if mine else {}, f"{names[id(p)]}'s ")
            if (step := mine.get("step")) is not None and not (math.isfinite(step) and step >= 0):
                raise CheckpointError(f"{file}: {names[id(p)]}'s step is {float(step)}")
    if unknown := sorted(name for name in moments.keys() - known if not RANDOM.fullmatch(name)):
        raise CheckpointError(f"{file}: {unknown[0]} is of no parameter of the optimiser")


_MISSING = object()


def _check_option(file: Path, name: str, got, want) -> None:
    """Raise CheckpointError unless a saved option exists in the optimiser and has the kind of its value there.

    Numbers must be finite and not negative, unless the optimiser's is; `betas` must be below 1.
    """
    if want is _MISSING:
        raise CheckpointError(f"{file}: {name} is no option of the optimiser")
    if _kind(got) != _kind(want) or (_kind(want) == "sequence" and len(got) != len(want)):
        raise CheckpointError(f"{file}: {name} is {got!r}, the optimiser has {want!r}")
    if _kind(want) == "sequence":
        for i, (g, w) in enumerate(zip(got, want)):
            _check_option(file, f"{name}[{i}]", g, w)
    elif _kind(want) == "number" and not (-math.inf if want < 0 else 0) <= got < (1 if "betas[" in name else math.inf):
        raise CheckpointError(f"{file}: {name} is {got!r}, out of range")


def _kind(option) -> str:
    if option is None or isinstance(option, bool):
        return "flag"  # None: the optimiser chooses
    if isinstance(option, (int, float, Tensor)):
        return "number"
    return "sequence" if isinstance(option, (tuple, list)) else type(option).__name__


def _of_parameter(moments: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = f"state.{name}."
    return {k.removeprefix(prefix): v for k, v in moments.items() if k.startswith(prefix)}


def _options(group: dict, saved: dict) -> dict:
    """Return the saved options in the types of the group's own: JSON has lists for tuples."""
    return {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved["options"].items()}


def _moments_of(file: Path, optimizer: torch.optim.Optimizer, group: dict, p: Tensor) -> dict[str, str]:
    """Return names and forms of a parameter's moments, which a step on zeros makes if there are none yet."""
    if optimizer.state.get(p):
        return _forms(optimizer.state[p])
    zeros = torch.zeros_like(p, requires_grad=True)
    zeros.grad = torch.zeros_like(p)
    scratch = copy.copy(optimizer)
    scratch.state, scratch.param_groups = defaultdict(dict), [{**group, "params": [zeros]}]
    try:
        type(optimizer).step(scratch)
    except Exception as error:
        raise CheckpointError(f"{file}: the optimiser cannot step with the saved options: {error}") from None
    return _forms(scratch.state[zeros])


def _check_random_states(file: Path, moments: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless all states are bytes and this process's generators accept theirs."""
    for name, state in moments.items():
        if RANDOM.fullmatch(name) and (state.dtype != torch.uint8 or state.dim() != 1):
            raise CheckpointError(f"{file}: {name} is {_form(state)}, expected uint8 in one dimension")
    for name, generator in _generators().items():
        try:
            torch.Generator(generator.device).set_state(moments.get(name, generator.get_state()))
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"{file}: {name} is no state of a {generator.device} generator: {error}") from None


def _load_optimizer(
    state: dict, moments: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names = _names(model)
    for group, saved in zip(optimizer.param_groups, state["optimizer"]):
        group.update(_options(group, saved))
        for p in group["params"]:
            mine = _of_parameter(moments, names[id(p)])
            # `step` is a scalar and never sharded; the moments have their parameter's sharding
            optimizer.state[p] = {k: _like(v, p) if v.dim() or not p.dim() else v.to(p.device) for k, v in mine.items()}
