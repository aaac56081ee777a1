"""Checks of resolved calls, reasons of compiled backends to refuse a call, and types under autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from . import dispatch, layouts

#: float types of every compiled backend; the reference alone takes float64
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: tensors of any stride: the kernels read them element by element
ANY_STRIDE = ("neighbour_gate", "decay")
#: the class of each op's calls
CALLS: dict[str, type] = {}
#: device types with autocast; computed at import, because torch 2.11 can't trace the call
_AUTOCAST = frozenset(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


def known(op: str, call, backend: str | None) -> layouts.Known:
    """Check a resolved call, and return its backend.

    Nothing before a raw operator checks its arguments, and kernels compute addresses from sizes and integers.
    """
    check_resolved(call)
    return layouts.Known(backend=dispatch.choose_backend(op, call, backend))


def known_backward(op: str, call, given: Sequence[Tensor | None], backend: str | None) -> layouts.Known:
    """Check a backward pass. Return its backend, and whether that backend reads the tensors as they are ("dense").

    given: the outputs that the backward pass reads, then the gradients of all outputs; they must have the types and
    shapes of the outputs.
    """
    readable_call, readable_given = readable(call, given)
    check_resolved(readable_call)
    meta = call._make(x.to("meta") if isinstance(x, Tensor) else x for x in call)
    made = dict(zip(call.RETURNS, meta.empty_outputs(), strict=True))
    named = {**{name: made[name] for name in kept(call)}, **{f"grad_{name}": out for name, out in made.items()}}
    for (name, out), value in zip(named.items(), given, strict=True):
        if value is not None and (value.dtype != out.dtype or value.shape != out.shape):
            got = f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{name}: expected {out.dtype} {list(out.shape)}; got {got}")
    pairs = zip((*call, *given), (*readable_call, *readable_given), strict=True)
    dense = all(copy is x for x, copy in pairs)
    return layouts.Known(backend=dispatch.choose_backend(op, readable_call, backend), dense=dense)


def readable(call, given: Sequence[Tensor | None]):
    """Return the call and the tensors, with copies of those without dense rows, so that a backward pass can read them.

    An expanded gradient (out.sum().backward()) has no dense rows. A saved-tensor hook may return an input or output
    without them.
    """
    outs = [out.contiguous() for out in given[: len(kept(call))]]
    grads = [g if g is None or checks.has_rows(g) else g.contiguous() for g in given[len(outs) :]]
    return with_dense_rows(call), (*outs, *grads)


def check_resolved(call) -> None:
    """Check a call whose defaults are filled in, as `checked` checks a caller's arguments."""
    given: dict = {}
    _check_seed(call)
    start, rel_key = getattr(call, "rel_start", 0), getattr(call, "rel_key", call)
    # `checked` computes the default of rel_start itself where it would refuse the default as an argument. The default
    # is the position less the number of keys, which may exceed the limit of an argument. A table without rows takes the
    # default only.
    no_rows = isinstance(rel_key, Tensor) and rel_key.dim() == 3 and rel_key.shape[1] == 0
    if abs(start) > checks.POSITION_MAX or rel_key is None or no_rows:
        given["rel_start"] = None
    for name, own in (("query_offset", "batch_offset"), ("query_start", "batch_start")):
        if getattr(call, own, None) is not None:
            checks.position(name, getattr(call, name))
            given[name] = getattr(call, own)
    # A backend copies or refuses a tensor without dense rows.
    if getattr(with_dense_rows(call)._replace(**given).checked(), "rel_start", 0) != start:
        checks.position("rel_start", start)


def with_dense_rows(call):
    """Return the call with a copy of each differentiable tensor without dense rows, except ANY_STRIDE."""
    tensors = {name: getattr(call, name) for name in call.DIFFERENTIABLE if name not in ANY_STRIDE}
    copies = {name: x.contiguous() for name, x in tensors.items() if x is not None and not checks.has_rows(x)}
    return call._replace(**copies) if copies else call


def _check_seed(call) -> None:
    """Raise ValueError for dropout without a seed that the kernels can read."""
    p, seed = getattr(call, "dropout_p", 0.0), getattr(call, "seed", None)
    device = call[0].device
    if p == 0 or (seed is not None and seed.dtype == torch.int64 and seed.shape == (1,) and seed.device == device):
        return
    got = "None" if seed is None else f"{seed.dtype} {list(seed.shape)} on {seed.device}"
    raise ValueError(f"seed: expected int64 [1] on {device} for dropout_p > 0; got {got}")


def kept(call_type) -> tuple[str, ...]:
    """Return the names of the outputs that a backward pass reads: KEPT of a call or its class, by default all."""
    return getattr(call_type, "KEPT", call_type.RETURNS)


def unsupported_tensors(tensors: dict[str, Tensor | None], device: str) -> str | None:
    """Why no compiled backend on `device` takes these float tensors: device, type, mixed types or strided rows."""
    expected = None
    for name, value in tensors.items():
        if value is None:
            continue
        expected = expected or value.dtype
        if value.device.type != device:
            return f"{name} is on {value.device}, not on a {device} device"
        if value.dtype not in KERNEL_DTYPES:
            return f"{name} is {value.dtype}; have float32, bfloat16, float16"
        if value.dtype != expected:
            return f"{name} is {value.dtype} among {expected}"
        if name not in ANY_STRIDE and not checks.has_rows(value):
            return f"the last dimension of {name} is not contiguous"
    return None


def cast(call):
    """Return the call with its floating tensors in autocast's type, where autocast is on for the first tensor's device.

    float64 tensors keep their type, as under torch's autocast. A class of calls may define its own `cast`.
    """
    if hasattr(call, "cast"):
        return call.cast()
    if not autocast_on(call[0]):
        return call
    dtype = torch.get_autocast_dtype(call[0].device.type)
    return type(call)(*(cast_tensor(value, dtype) for value in call))


def autocast_on(first) -> bool:
    device = first.device.type if isinstance(first, Tensor) else None
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def cast_tensor(value, dtype: torch.dtype):
    """Return a floating tensor in another type; float64 and everything else as it is."""
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if narrow else value
