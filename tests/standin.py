"""A device without hardware: it refuses tensors of another device, like a GPU, and counts the host's waits.

Its tensors are `Far`: they report `meta` as device and hold their values on the CPU. Inside `standing_in()` a tensor
created on `meta` is one of them. The reference serves the package's ops. `rocm` stands in for an AMD GPU and has no
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from retro_kernels.compile import target
from retro_kernels.compile.target import AMD
from retro_kernels.core import dispatch

DEVICE = "meta"
_aten = torch.ops.aten
#: operators whose output size depends on values: the host waits for them
_READ = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
#: a CPU tensor may index a GPU tensor: torch copies it, and waits
_INDEX = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class Far(torch.Tensor):
    """A tensor of the stand-in; `waits`: the operators for which the host waited, in order."""

    waits: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(DEVICE), **options)

    def __init__(self, held: torch.Tensor):
        self.held = held

    def __repr__(self):
        return f"Far({self.held})"

    def tolist(self):  # torch has none for subclasses
        Far.waits.append("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, dict(kwargs or {}))


class _Device(TorchDispatchMode):
    """Catches the factories too, which take no tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, dict(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Makes a list a CPU tensor first and copies it; torch would leave a `meta` tensor without values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") and not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs | {"device": "cpu"})).to(kwargs["device"])
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Far):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(one) if isinstance(one, list) else one for one in index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


def _run(func, args: tuple, kwargs: dict):
    """Run an operator on the held values and put its results on the stand-in."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    far, near = any(isinstance(t, Far) for t in tensors), any(not isinstance(t, Far) and t.dim() for t in tensors)
    to = kwargs.get("device") and torch.device(kwargs["device"]).type
    here = to == DEVICE if to else far
    if func is _aten.copy_.default:
        here = isinstance(args[0], Far)
    if far and near and func in _INDEX and isinstance(args[0], Far):
        Far.waits.append(f"{func} by an index of the host")
    elif far and near and func not in _COPIES:
        raise RuntimeError(f"{func}: expected all tensors on one device; got {DEVICE} and cpu")
    if far and (func in _READ or any(_is_mask(index) for index in (args[1] if func in _INDEX else ()))):
        Far.waits.append(str(func))
    asynchronous = kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:3] == (True,))
    if func in _COPIES and here and near and not asynchronous:
        Far.waits.append(f"{func} from the host")
    if func in _COPIES and far and not here:
        Far.waits.append(f"{func} to the host")
    args, kwargs = tree_map_only(Far, lambda t: t.held, (args, kwargs))
    if to == DEVICE:
        kwargs["device"] = torch.device("cpu")
    if far and func.namespace == "retro_kernels":
        args = tuple("reference" if isinstance(value, str) and value in dispatch.ORDER else value for value in args)
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, Far, out) if here else out


def _is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def module_to(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module's parameters and buffers to the stand-in."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(Far(parameter.detach()), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Far(buffer)
    return module


@contextlib.contextmanager
def standing_in() -> Iterator[list[str]]:
    """Make DEVICE the stand-in; yields the list of the host's waits."""
    Far.waits = waits = []
    enabled = torch.is_autocast_enabled
    without = mock.patch.object(torch, "is_autocast_enabled", lambda device="cpu": device != DEVICE and enabled(device))
    fused = mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *args, **options: None)
    with without, fused, _Device(), _Lists():  # torch has neither autocast nor a fused optimiser for `meta`
        yield waits


@contextlib.contextmanager
def rocm(arch: str = "gfx942") -> Iterator[None]:
    """Make torch report a ROCm build with one AMD GPU, whose properties lack NVIDIA's fields.

    major and minor are ROCm's: by them gfx942 would be sm_94.
    """
    known = AMD.get(arch, AMD["gfx942"])
    sizes = {"multi_processor_count": known.multiprocessors, "total_memory": 192 << 30, "L2_cache_size": 4 << 20}
    sizes |= {"warp_size": known.warp_size, "shared_memory_per_block": known.shared_memory, "major": 9, "minor": 4}
    properties = SimpleNamespace(name="AMD Instinct", gcnArchName=f"{arch}:sramecc+:xnack-", **sizes)
    fakes = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0}
    fakes["get_device_properties"] = lambda index: properties
    caches = (target._gpu_target, dispatch._status, dispatch._available)
    with mock.patch.multiple(torch.version, hip="6.4.43482", cuda=None), mock.patch.multiple(torch.cuda, **fakes):
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()
