"""torch.library registration, one function for every op: schema, implementation, fake, autograd.

For an op `f` it registers `retro_kernels::f(<arguments>, str? backend)` and `retro_kernels::f_backward`, whose fake and
implementation follow from the NamedTuple of the call. These are the raw operators: the public functions validate
first, the raw ones trust what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _dispatch, _problem
from .checks import has_rows

NAMESPACE = "retro_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEVICES = ("CPU", "CUDA")
#: asked here once: torch 2.11 can't trace the question
_AUTOCAST = frozenset(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


def register(op: str, problem: type, returns: Sequence[str], fake: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register `op`.

    problem  NamedTuple of the call; its fields are the arguments, in the order of the schema
    returns  names of the output tensors
    fake     call -> empty outputs
    """
    fields, arguments = len(problem._fields), _problem.schema(problem)
    where = [problem._fields.index(name) for name in problem.DIFFERENTIABLE]
    count = len(returns)
    outputs = ", ".join(f"Tensor {name}" for name in returns)
    grads = ", ".join(f"Tensor? grad_{name}" for name in returns)
    result = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    forward_name, backward_name = f"{NAMESPACE}::{op}", f"{NAMESPACE}::{op}_backward"
    _LIBRARY.define(f"{op}({arguments}, str? backend) -> {result}")
    _LIBRARY.define(f"{op}_backward({arguments}, str? backend, {outputs}, {grads}, bool[] needs) -> Tensor[]")

    def forward(*args):
        call = problem(*args[:fields])
        with _full_precision(call), _on_device(call[0]):
            outs = tuple(out.contiguous() for out in _dispatch.choose(op, call, args[fields]).forward(call))
        return outs if count > 1 else outs[0]

    def forward_fake(*args):
        outs = fake(problem(*args[:fields]))
        return outs if count > 1 else outs[0]

    def backward(*args):
        call, backend, needs = problem(*args[:fields]), args[fields], tuple(args[-1])
        outs = args[fields + 1 : fields + 1 + count]
        # an expanded gradient (out.sum().backward()) has no rows to read: this is the one copy that is made of it
        contiguous = tuple(g if g is None or has_rows(g) else g.contiguous() for g in args[fields + 1 + count : -1])
        with _full_precision(call), _on_device(call[0]):
            results = _dispatch.choose(op, call, backend).backward(call, outs, contiguous, needs)
        return [grad.contiguous() for grad, needed in zip(results, needs, strict=True) if needed]

    def backward_fake(*args):
        inputs = [args[i] for i in where]
        return [
            torch.empty(t.shape, dtype=t.dtype, device=t.device)
            for t, needed in zip(inputs, args[-1], strict=True)
            if needed
        ]

    for device in _DEVICES:
        _LIBRARY.impl(op, forward, device)
        _LIBRARY.impl(f"{op}_backward", backward, device)
    torch.library.register_fake(forward_name, forward_fake, lib=_LIBRARY)
    torch.library.register_fake(backward_name, backward_fake, lib=_LIBRARY)
    _register_autograd(op, forward_name, backward_name, fields, where, count)


def _register_autograd(
    op: str, forward_name: str, backward_name: str, fields: int, where: list[int], count: int
) -> None:
    def setup_context(ctx, inputs, output):
        outs = (output,) if count == 1 else output
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, *outs)
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *grads):
        grads_in = [None] * (fields + 1)
        needs = [ctx.needs_input_grad[i] for i in where]
        if not any(needs) or all(g is None for g in grads):
            return tuple(grads_in)
        saved = ctx.saved_tensors
        args = [option if t is None else t for t, option in zip(saved[: fields + 1], ctx.options, strict=True)]
        results = iter(
            getattr(getattr(torch.ops, NAMESPACE), f"{op}_backward")(*args, *saved[fields + 1 :], *grads, needs)
        )
        for i, needed in zip(where, needs, strict=True):
            grads_in[i] = next(results) if needed else None
        return tuple(grads_in)

    def no_second_derivative(ctx, *grads):
        raise RuntimeError(f"retro_kernels.{op}: second derivatives are not implemented")

    torch.library.register_autograd(forward_name, differentiate, setup_context=setup_context, lib=_LIBRARY)
    torch.library.register_autograd(backward_name, no_second_derivative, lib=_LIBRARY)


def _full_precision(call) -> contextlib.AbstractContextManager:
    """Autocast off: it would narrow the float32 products inside a backend, which chose its types itself."""
    device = call[0].device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """The tensor's GPU current, for kernels launch on the current device and its stream; nothing to do where it is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def autocast(call):
    """The call with its floating tensors in autocast's type, where autocast is on for the first tensor's device.

    What torch does for its own attention. float64 is left alone, as autocast does.
    """
    if not autocast_on(call[0]):
        return call
    dtype = torch.get_autocast_dtype(call[0].device.type)
    return type(call)(*(_cast(value, dtype) for value in call))


def autocast_to_first(call, may_stay_float32: tuple[str, ...] = ()):
    """The call with its floating tensors in the type of the first, where autocast is on; those named may stay float32.

    For a running sum, which keeps its input's type, as torch's cumsum does. Its other tensors may come out of layers
    that autocast narrowed, or be parameters, which it left.
    """
    if not autocast_on(call[0]):
        return call
    named = call._asdict()
    stay = [name for name in may_stay_float32 if isinstance(named[name], Tensor) and named[name].dtype == torch.float32]
    return type(call)(**{name: value if name in stay else _cast(value, call[0].dtype) for name, value in named.items()})


def autocast_on(first) -> bool:
    device = first.device.type if isinstance(first, Tensor) else None
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def _cast(value, dtype: torch.dtype):
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if narrow else value


def dropout_seed(device: torch.device, dropout_p: float) -> Tensor | None:
    """A fresh seed [1] from torch's generator of that device (so `torch.manual_seed` governs it), or None at p = 0."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device) if dropout_p > 0 else None
