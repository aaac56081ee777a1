"""Answers of `torch.cuda` for an emulated GPU; on request, the device "cuda" mapped to the CPU.

`answers` alone leaves devices as they are: a program that asks for a GPU's name, capability or properties gets them,
and tensors stay on the CPU. `mapped` is for programs that put their tensors on "cuda": every function of torch that
takes a device takes the CPU in its place, and tensors answer where they would be. Not mapped: extensions that read a
tensor's device in C++, bodies of custom operators, torch.compile for a GPU, other processes. CUDA graphs are refused.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from .parse import PtxError

_CUDA = torch.device("cuda", 0)


def _giving(value):
    """Return a function that returns `value`; a new one each time, for torch's compiler keeps a table of functions."""
    return lambda *_, **__: value


class Stream(contextlib.AbstractContextManager):
    """Stream on which everything is done at once."""

    cuda_stream = stream_id = device_index = 0
    device = _CUDA
    __init__ = __exit__ = synchronize = wait_stream = wait_event = _giving(None)
    query, is_capturing = _giving(True), _giving(False)

    def record_event(self, event=None):
        return event or Event()


class Device(contextlib.AbstractContextManager):
    """Context of a device: there is one only."""

    def __init__(self, device=None):
        self.idx, self.prev_idx = 0, 0

    def __exit__(self, *_):
        return None


class Graph:
    """CUDA graph."""

    def __init__(self, *_, **__):
        raise PtxError("not emulated: CUDA graphs")


class Event:
    """Event that is over; no time passes between two."""

    __init__ = record = wait = synchronize = _giving(None)
    elapsed_time, query = _giving(0.0), _giving(True)


_DONE_AT_ONCE = ("synchronize", "empty_cache", "set_device", "init", "_lazy_init", "ipc_collect")
_DONE_AT_ONCE += ("manual_seed", "manual_seed_all", "seed", "seed_all")
_DONE_AT_ONCE += ("reset_peak_memory_stats", "reset_max_memory_allocated")
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def answers(device) -> list:
    """Return patches under which `torch.cuda` describes a `machines.Machine`."""
    properties = types.SimpleNamespace(**device.properties)
    functions = {
        **dict.fromkeys(("is_available", "is_bf16_supported"), _giving(True)),
        # not initialised, so that torch seeds and saves nothing there
        **dict.fromkeys(("is_initialized", "is_current_stream_capturing"), _giving(False)),
        **dict(device_count=lambda: 1, current_device=lambda: 0),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{device.arch}"],
        "mem_get_info": lambda *_: (device.total_memory, device.total_memory),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: Stream()),
        "stream": lambda stream: contextlib.nullcontext(),
        **dict(Stream=Stream, Event=Event, device=Device, device_of=Device),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        **{name: _giving(None) for name in _DONE_AT_ONCE},
        **{name: _giving(0) for name in _BYTES},
    }
    return [
        mock.patch.multiple(torch.cuda, **functions),
        mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True),
    ]


def _place_of(value) -> str | None:
    place = str(value).partition(":")[0] if isinstance(value, (str, torch.device)) else None
    return place if place in ("cuda", "cpu") else None


def _on_cpu(value):
    """Return "cpu" instead of a device "cuda", and any other value as it is."""
    return "cpu" if _place_of(value) == "cuda" else value


def home(tensor: Tensor) -> str | None:
    """Return "cuda" or "cpu", where a tensor would be on a GPU's machine; None: not known, such as of a gradient."""
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without memory
        return getattr(tensor.untyped_storage(), "_home", None)


def _tensors(value) -> list[Tensor]:
    if isinstance(value, (tuple, list, dict)):
        return [one for part in (value.values() if isinstance(value, dict) else value) for one in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _put(value, place: str | None):
    """Note where new tensors are. A view is where its storage is."""
    for tensor in _tensors(value) if place else ():
        with contextlib.suppress(NotImplementedError, RuntimeError):
            if home(tensor) is None:
                tensor.untyped_storage()._home = place
    return value


#: operations that refuse tensors on two devices, unless one has no dimensions, which counts as a number
_ONE_DEVICE = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv",
    "pow", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge", "cat", "stack", "matmul", "rmatmul",
    "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "linear", "embedding", "conv1d", "conv2d", "layer_norm",
    "mse_loss", "scaled_dot_product_attention",
}  # fmt: skip


class CudaIsCpu(TorchFunctionMode):
    """Gives functions of torch the CPU where they are given "cuda". Tensors say that they are on cuda:0 or the CPU."""

    default = "cpu"  # where new tensors are

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _ANSWERS:
            return _ANSWERS[function](function, args, kwargs)
        place = next(map(_place_of, filter(_place_of, (kwargs.get("device"), *args))), None)
        given = _tensors((args, kwargs))
        homes = {home(one): bool(one.dim()) for one in sorted(given, key=Tensor.dim)}
        if homes.get("cuda") and homes.get("cpu") and function.__name__.strip("_") in _ONE_DEVICE:
            found = "found at least two devices, cuda:0 and cpu!"
            raise RuntimeError(f"Expected all tensors to be on the same device, but {found}")
        if place is None:
            place = next((one for one in ("cuda", None, "cpu") if one in homes), None) if given else CudaIsCpu.default
        if isinstance(kwargs.get("device"), int):
            kwargs["device"], place = "cpu", "cuda"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return _put(function(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in kwargs.items()}), place)


def _is_there(tensor: Tensor, place: str) -> bool:
    return tensor.device.type == "cpu" and (home(tensor) == "cpu") == (place == "cpu")


def _to_device_of(function, args, kwargs):
    """Tensor.to, whose device may be anywhere among the arguments, or the device of another tensor."""
    places = [home(one) or "cuda" for one in _tensors((args[1:], kwargs))]
    places += ["cuda" if type(one) is int else _place_of(one) for one in (*args[1:], kwargs.get("device"))]
    place = next(filter(None, places), home(args[0]))
    args = ["cpu" if type(value) is int else _on_cpu(value) for value in args]
    return _moved(args[0], function(*args, **{key: _on_cpu(value) for key, value in kwargs.items()}), place)


def _moved(tensor: Tensor, found: Tensor, place: str | None) -> Tensor:
    """Return a tensor at a place: a copy if it came from another one."""
    same = found is tensor and place is not None and not _is_there(tensor, place)
    return _put(found.clone() if same and found.device.type == "cpu" else found, place)


def _numpy(function, args, kwargs):
    if home(args[0]) == "cuda":
        remedy = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy. {remedy}")
    return function(*args, **kwargs)


def _typed(function, args, kwargs):
    """Tensor.type, whose argument may name a type of torch.cuda."""
    args = [one.replace("torch.cuda.", "torch.") if isinstance(one, str) else one for one in args]
    found = function(*args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


_ANSWERS = {
    **dict.fromkeys((torch.device, torch._C._nn._parse_to), lambda function, args, kwargs: function(*args, **kwargs)),
    Tensor.device.__get__: lambda function, args, kwargs: _CUDA if _is_there(args[0], "cuda") else args[0].device,
    Tensor.is_cuda.__get__: lambda function, args, kwargs: _is_there(args[0], "cuda"),
    Tensor.is_cpu.__get__: lambda function, args, kwargs: _is_there(args[0], "cpu"),
    Tensor.get_device: lambda function, args, kwargs: 0 if _is_there(args[0], "cuda") else -1,
    Tensor.cuda: lambda function, args, kwargs: _moved(args[0], args[0], "cuda"),
    Tensor.cpu: lambda function, args, kwargs: _moved(args[0], function(*args, **kwargs), "cpu"),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.pin_memory: lambda function, args, kwargs: args[0],
    Tensor.record_stream: _giving(None),
    Tensor.to: _to_device_of,
    Tensor.type: _typed,
}


class Generator(torch.Generator):
    """Generator of random numbers; one for "cuda" is one for the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, _on_cpu(device))


_ACCELERATOR = {"current_accelerator": lambda *_, **__: torch.device("cuda"), "current_device_index": _giving(0)}
_ACCELERATOR |= {"is_available": _giving(True), "current_stream": lambda *_: Stream(), "synchronize": _giving(None)}
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_TYPES = {f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TYPES}


def _shape_and_type(tensor: Tensor) -> dict:
    """Metadata that activation checkpointing compares: not devices, because its hooks run with and without modes."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _loaded_to(location):
    """Return where torch.load puts storages: on the CPU instead of "cuda"."""
    if isinstance(location, dict):
        return {key: _loaded_to(value) for key, value in location.items()}
    return "cpu" if location is None else _on_cpu(location)


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """Inside, "cuda" is the CPU for torch, in a backward pass too."""
    mode = CudaIsCpu()
    backward, default, load = torch.autograd._engine_run_backward, torch.set_default_device, torch.load
    threads, from_numpy = threading.Thread._bootstrap_inner, torch.from_numpy
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    start = getattr(torch.distributed, "init_process_group", None)

    def with_mode(*args, **kwargs):  # torch calls `backward` and `grad` with modes off
        if any(isinstance(one, CudaIsCpu) for one in _get_current_function_mode_stack()):
            return backward(*args, **kwargs)
        with mode:
            return backward(*args, **kwargs)

    def loaded(file, map_location=None, **kwargs):
        return load(file, map_location=_loaded_to(map_location), **kwargs)

    def defaults(device):
        CudaIsCpu.default = "cuda" if _place_of(device) == "cuda" else "cpu"
        default(None if _place_of(device) == "cuda" else device)

    def entered(context):  # both types of device, because Triton's callers ask for the type of "cuda"
        if context.device == "cuda":
            context.on_cpu = torch.autocast("cpu", context.fast_dtype, context._enabled)
            enter(context.on_cpu)
        return enter(context)

    def left(context, *why):
        if context.device == "cuda":
            leave(context.on_cpu, *why)
        return leave(context, *why)

    def started(backend=None, *args, device_id=None, **kwargs):
        return start("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

    def in_thread(thread):  # torch keeps modes by thread
        with CudaIsCpu():
            threads(thread)

    with (
        mode,
        mock.patch.multiple(torch, load=loaded, set_default_device=defaults, Generator=Generator),
        mock.patch.object(torch, "from_numpy", lambda array: _put(from_numpy(array), "cpu")),
        mock.patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, default=_shape_and_type),
        mock.patch.object(threading.Thread, "_bootstrap_inner", in_thread),
        mock.patch.object(torch.autograd, "_engine_run_backward", with_mode),
        mock.patch.object(CudaIsCpu, "default", "cpu"),
        mock.patch.multiple(torch.autocast, __enter__=entered, __exit__=left),
        mock.patch.multiple(torch.cuda, create=True, CUDAGraph=Graph, graph=Graph, **_TYPES),
        mock.patch.multiple(torch.distributed, create=True, init_process_group=started),
        mock.patch.object(torch.UntypedStorage, "cuda", lambda storage, *_, **__: storage),
        mock.patch.multiple(torch.accelerator, **_ACCELERATOR),
    ):
        yield
