"""Answers of `torch.cuda` for an emulated GPU; on request, the device "cuda" mapped to the CPU.

`answers` alone leaves devices as they are: a program that asks for a GPU's name, capability or properties gets them,
and tensors stay on the CPU. `mapped` is for programs that put their tensors on "cuda": every function of torch that
takes a device takes the CPU in its place, and CPU tensors answer that they are on cuda:0. Not mapped: extensions that
read a tensor's device in C++, CUDA graphs, torch.compile for a GPU, autocast inside torch's own operators, other
processes.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_CUDA = torch.device("cuda", 0)


def _giving(value):
    """Return a function that returns `value`; a new one each time, for torch's compiler keeps a table of functions."""
    return lambda *_, **__: value


class Stream(contextlib.AbstractContextManager):
    """Stream on which everything is done at once."""

    cuda_stream = stream_id = device_index = 0
    device = _CUDA
    __init__ = __exit__ = synchronize = wait_stream = wait_event = _giving(None)
    query = _giving(True)

    def record_event(self, event=None):
        return event or Event()


class Device(contextlib.AbstractContextManager):
    """Context of a device: there is one only."""

    def __init__(self, device=None):
        self.idx, self.prev_idx = 0, 0

    def __exit__(self, *_):
        return None


class Event:
    """Event that is over; no time passes between two."""

    __init__ = record = wait = synchronize = _giving(None)
    elapsed_time, query = _giving(0.0), _giving(True)


_DONE_AT_ONCE = ("synchronize", "empty_cache", "set_device", "init", "_lazy_init", "ipc_collect")
_DONE_AT_ONCE += ("manual_seed", "manual_seed_all", "seed", "seed_all")
_DONE_AT_ONCE += ("reset_peak_memory_stats", "reset_max_memory_allocated")
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def answers(device) -> list:
    """Return patches under which `torch.cuda` describes a `machines.Device`."""
    major, minor = device.capability
    shared = device.shared_memory_per_multiprocessor
    properties = types.SimpleNamespace(
        **vars(device), major=major, minor=minor, shared_memory_per_multiprocessor=shared
    )
    functions = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_initialized": lambda: False,  # so that torch seeds and saves nothing there
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: device.name,
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{device.arch}"],
        "mem_get_info": lambda *_: (device.total_memory, device.total_memory),
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "device": Device,
        "device_of": Device,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        **{name: _giving(None) for name in _DONE_AT_ONCE},
        **{name: _giving(0) for name in _BYTES},
    }
    patches = [mock.patch.object(torch.cuda, name, answer) for name, answer in functions.items()]
    patches.append(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        patches.append(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True))
    return patches


def _is_cuda(value) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class CudaIsCpu(TorchFunctionMode):
    """Gives functions of torch the CPU where they are given "cuda". CPU tensors say that they are on cuda:0."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _ANSWERS:
            return _ANSWERS[function](function, args, kwargs)
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        kwargs = {key: "cpu" if _is_cuda(value) else value for key, value in kwargs.items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


def _device(function, args, kwargs):
    found = function(*args, **kwargs)
    return _CUDA if found.type == "cpu" else found


def _to_device_of(function, args, kwargs):
    """Tensor.to, whose device may be anywhere among the arguments. The device of another tensor is the CPU already."""
    args = tuple("cpu" if _is_cuda(value) or type(value) is int else value for value in args)
    kwargs = {key: "cpu" if _is_cuda(value) else value for key, value in kwargs.items()}
    return function(*args, **kwargs)


_ANSWERS = {
    torch.device: lambda function, args, kwargs: function(*args, **kwargs),
    Tensor.device.__get__: _device,
    Tensor.is_cuda.__get__: lambda function, args, kwargs: not function(*args, **kwargs) and args[0].is_cpu,
    Tensor.is_cpu.__get__: _giving(False),
    Tensor.get_device: _giving(0),
    Tensor.cuda: lambda function, args, kwargs: args[0],
    Tensor.pin_memory: lambda function, args, kwargs: args[0],
    Tensor.record_stream: _giving(None),
    Tensor.to: _to_device_of,
}


class Generator(torch.Generator):
    """Generator of random numbers; one for "cuda" is one for the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if _is_cuda(device) else device)


_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def _typed(function, args, kwargs):
    """Tensor.type, whose argument may name a type of torch.cuda."""
    args = tuple(one.replace("torch.cuda.", "torch.") if isinstance(one, str) else one for one in args)
    found = function(*args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


_ANSWERS[Tensor.type] = _typed


def _shape_and_type(tensor: Tensor) -> dict:
    """Metadata that activation checkpointing compares: not devices, because its hooks run with and without modes."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _place(location):
    """Return where torch.load puts storages: on the CPU instead of "cuda"."""
    if location is None or _is_cuda(location):
        return "cpu"
    return {key: _place(value) for key, value in location.items()} if isinstance(location, dict) else location


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """Inside, "cuda" is the CPU for torch, in a backward pass too."""
    mode = CudaIsCpu()
    backward, default, load = torch.autograd._engine_run_backward, torch.set_default_device, torch.load
    threads = threading.Thread._bootstrap_inner

    def with_mode(*args, **kwargs):  # torch calls `backward` and `grad` with modes off
        if any(isinstance(one, CudaIsCpu) for one in _get_current_function_mode_stack()):
            return backward(*args, **kwargs)
        with mode:
            return backward(*args, **kwargs)

    def loaded(file, map_location=None, **kwargs):
        return load(file, map_location=_place(map_location), **kwargs)

    def in_thread(thread):  # torch keeps modes by thread
        with CudaIsCpu():
            threads(thread)

    with (
        mode,
        contextlib.ExitStack() as stack,
        mock.patch.object(torch, "load", loaded),
        mock.patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, default=_shape_and_type),
        mock.patch.object(threading.Thread, "_bootstrap_inner", in_thread),
        mock.patch.object(torch.autograd, "_engine_run_backward", with_mode),
        mock.patch.object(torch, "set_default_device", lambda device: default("cpu" if _is_cuda(device) else device)),
        mock.patch.object(torch, "Generator", Generator),
    ):
        for name in _TYPES:
            patch = mock.patch.object(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"), create=True)
            stack.enter_context(patch)
        yield
