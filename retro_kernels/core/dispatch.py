"""Choice of the backend that serves a call: the one named, else the first of ORDER that can.

A backend of an op is a module or package `ops/<op>/<backend>` with `unsupported(call)`, `forward(call)` and
`backward(call, outputs, grads, needs)`. Its presence is its registration. `unsupported(call)` says why it can't serve a
call; the reference serves every call and has none. `unavailable(backend)` says why this machine can't run the backend
at all. A module may also have `slower(call)`, why another backend serves the call faster: the automatic choice then
skips the module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .. import extensions, triton_lib

_FOLDER = Path(__file__).resolve().parent.parent / "ops"
#: names of the ops: the folders
OPS = tuple(sorted(folder.name for folder in _FOLDER.iterdir() if (folder / "call.py").exists()))
ORDER = ("cuda", "triton", "cpu", "reference")  # fastest first; `cuda` refuses calls that `triton` serves faster
_KERNELS = {"cpu": "cpu", "cuda": "triton"}  # device type -> the backend that has a kernel of every op

#: open contexts of `use_backend`, each a list of one name; the last one opened applies
_open: list[list[str | None]] = []


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """Whether this machine can run one backend of one op. `reason`: why it can't, or None."""

    available: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.available


def backends() -> dict[str, dict[str, BackendStatus]]:
    """Return the status of each backend of each op on this machine.

    Examples:
        >>> backends()["topk_chunks"]["reference"].available
        True
    """
    return {op: {name: _status(op, name) for name in ORDER} for op in OPS}


def use_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Context manager: calls without `backend=` use `name` inside it (None: the fastest).

    It applies to the whole process, like every default of torch that `torch.compile` can see. Raises ValueError for an
    unknown name.
    """
    return _using(None if name is None else named(name))


@contextlib.contextmanager
def _using(name: str | None) -> Iterator[None]:
    mine = [name]
    _open.append(mine)
    try:
        yield
    finally:  # other threads may have opened contexts since, so this one need not be the last
        _open[:] = [other for other in _open if other is not mine]


def named(backend: str | None) -> str | None:
    """Return `backend`, or the default where it is None. Raises ValueError for an unknown name."""
    if backend is None:
        return _open[-1][0] if _open else None
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected None or a str; got {type(backend).__name__}")
    if backend not in ORDER:
        raise ValueError(f"backend: expected None or one of {', '.join(map(repr, ORDER))}; got {backend!r}")
    return backend


def choose_backend(op: str, call, backend: str | None) -> ModuleType:
    """Return the module that serves `call`. Raises ValueError, with the reason, if the named backend cannot."""
    for value in call:
        if isinstance(value, Tensor) and value.numel() == 0:
            return module(op, "reference")  # kernels need a grid that is not empty
    if backend is None:
        backend = fastest(op, call)
        if backend == "reference":
            _warn_of_fallback(op, call)
    elif why := unsupported(op, backend, call):
        raise ValueError(f"backend: {backend!r} cannot serve this call of {op}: {why}")
    return module(op, backend)


def fastest(op: str, call) -> str:
    """Return the first available backend that serves the call and does not say that another one is faster."""
    return next(name for name in _available(op) if not (unsupported(op, name, call) or _slower(op, name, call)))


def _warn_of_fallback(op: str, call) -> None:
    """Warn, once for each op, that the reference serves a call although the device has a kernel for it."""
    tensor = next(t for t in call if isinstance(t, Tensor))
    kernels = _KERNELS.get(tensor.device.type)
    status = _status(op, kernels) if kernels and exists(op, kernels) else None
    if status is not None and not status and tensor.dtype != torch.float64:
        serves = f"the slow reference in plain PyTorch serves {op} on {tensor.device.type}"
        _warn_once(f"retro_kernels: {serves}: {status.reason}")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def unsupported(op: str, name: str, call) -> str | None:
    """Why a backend can't serve the call; None if it can."""
    status = _status(op, name)
    if not status:
        return status.reason
    return None if name == "reference" else module(op, name).unsupported(call)


def _slower(op: str, name: str, call) -> str | None:
    slower = getattr(module(op, name), "slower", None)
    return slower(call) if slower else None


@functools.cache
def _available(op: str) -> tuple[str, ...]:
    return tuple(name for name in ORDER if _status(op, name))


def exists(op: str, name: str) -> bool:
    """Whether the op has a module of that backend."""
    return (_FOLDER / op / name).is_dir() or (_FOLDER / op / f"{name}.py").exists()


def unavailable(name: str) -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    if name == "triton":
        return triton_lib.unavailable()
    if name == "reference":
        return None
    return extensions.cuda_unavailable() if name == "cuda" else extensions.unavailable("_cpu")


@functools.cache
def _status(op: str, name: str) -> BackendStatus:
    why = unavailable(name) if exists(op, name) else f"{op} has no {name} kernel"
    return BackendStatus(why is None, why)


@functools.cache
def module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"retro_kernels.ops.{op}.{name}")
