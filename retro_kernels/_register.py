"""torch.library registration, one function for every op: schema, implementation, fake, autograd.

For an op `f` it registers `retro_kernels::f(<arguments>, str? backend)` and `retro_kernels::f_backward`, whose fake and
implementation follow from the NamedTuple of the call. These are the raw operators: the public functions validate
first, the raw ones trust what they are given.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _dispatch, _problem

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
        given = tuple(g if g is None or _has_rows(g) else g.contiguous() for g in args[fields + 1 + count : -1])
        with _full_precision(call), _on_device(call[0]):
            found = _dispatch.choose(op, call, backend).backward(call, outs, given, needs)
        return [grad.contiguous() for grad, needed in zip(found, needs, strict=True) if needed]

    def backward_fake(*args):
        inputs = [args[i] for i in where]
        return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, needed in zip(inputs, args[-1], strict=True) if needed]

    for device in _DEVICES:
        _LIBRARY.impl(op, forward, device)
        _LIBRARY.impl(f"{op}_backward", backward, device)
    torch.library.register_fake(forward_name, forward_fake, lib=_LIBRARY)
    torch.library.register_fake(backward_name, backward_fake, lib=_LIBRARY)
    _register_autograd(op, forward_name, backward_name, fields, where, count)


def _register_autograd(op: str, forward_name: str, backward_name: str, fields: int, where: list[int], count: int) -> None:
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
        found = iter(getattr(getattr(torch.ops, NAMESPACE), f"{op}_backward")(*args, *saved[fields + 1 :], *grads, needs))
        for i, needed in zip(where, needs, strict=True):
            grads_in[i] = next(found) if needed else None
        return tuple(grads_in)

    def no_second_derivative(ctx, *grads):
        raise RuntimeError(f"retro_kernels.{op}: second derivatives are not implemented")

    torch.library.register_autograd(forward_name, differentiate, setup_context=setup_context, lib=_LIBRARY)
    torch.library.register_autograd(backward_name, no_second_derivative, lib=_LIBRARY)


def serve(op: str, call, backend: str | None, resolve: Callable):
    """Check, choose and run a call of the public op; `resolve` checks it and fills its defaults in.

    An eager call on the CPU that nobody but its implementation wants to know of, a step of decoding above all, is checked and given a
    backend once for its shapes, strides and options: later ones go straight to the kernel. torch's way through a registered
    operator alone costs more than all else that the host does in such a call.
    """
    backend = _dispatch.named(backend)
    signature = None if torch.compiler.is_compiling() else _signature(op, call, backend)
    if signature is not None and (plan := _PLANS.get(signature)) is not None:
        forward, fields, options = plan
        outs = forward(call._make(fields((*call, *options))))
        return outs if len(outs) > 1 else outs[0]
    resolved = resolve(call)
    if signature is not None and getattr(resolved, "dropout_p", 0.0) == 0.0:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[signature] = _plan(op, call, resolved, backend)
    return getattr(getattr(torch.ops, NAMESPACE), op)(*resolved, backend)


#: signature -> (forward of the backend, which of the call's fields and of the options make up the resolved call, options)
_PLANS: dict[tuple, tuple[Callable, Callable, tuple]] = {}
_MOST_PLANS = 4096  # of some hundred bytes


def _plan(op: str, call, resolved, backend: str | None) -> tuple[Callable, Callable, tuple]:
    """Holds no tensor: those are taken from each call, wherever `resolve` moved them to."""
    moved = [i for i, (given, found) in enumerate(zip(call, resolved, strict=True)) if given is not found]
    where, options = [], []
    for i, value in enumerate(resolved):
        if not isinstance(value, Tensor):
            where.append(len(call) + len(options))
            options.append(value)
        elif value is call[i]:  # where it was: one tensor may be given for several arguments
            where.append(i)
        else:
            where.append(next(j for j in moved if call[j] is value))
    return _dispatch.choose(op, resolved, backend).forward, operator.itemgetter(*where), tuple(options)


def _signature(op: str, call, backend: str | None) -> tuple | None:
    """What checks and choice depend on; None where a gradient, mode, transform, tracer or profiler wants to know of the call."""
    parts: list = [op, backend]
    grad = torch.is_grad_enabled()
    for value in call:
        if isinstance(value, Tensor):
            if (grad and value.requires_grad) or torch._C._dispatch_keys(value).raw_repr() not in _PLAIN:
                return None
            parts += (value.dtype, value.shape, value.stride())
        elif value is None or value.__class__ in _OPTIONS:
            parts += (value.__class__, value)
        else:
            return None
    alone = (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
    return tuple(parts) if alone else None


_OPTIONS = frozenset((int, float, bool, str))


def _plain_keys() -> frozenset[int]:
    """Dispatch keys of an ordinary CPU tensor and of one of inference mode: no subclass, no lazy negation, no wrapper."""
    found = [torch._C._dispatch_keys(torch.empty(0)).raw_repr()]
    with torch.inference_mode():
        found.append(torch._C._dispatch_keys(torch.empty(0)).raw_repr())
    return frozenset(found)


_PLAIN = _plain_keys()


def _has_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


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
    if not _autocast_on(call[0]):
        return call
    dtype = torch.get_autocast_dtype(call[0].device.type)
    return type(call)(*(_cast(value, dtype) for value in call))


def autocast_to_first(call, wide: tuple[str, ...] = ()):
    """The call with its floating tensors in the type of the first, where autocast is on; those named in `wide` may stay float32.

    For a running sum, which keeps its input's type, as torch's cumsum does. Its other tensors may come out of layers that
    autocast narrowed, or be parameters, which it left.
    """
    if not _autocast_on(call[0]):
        return call
    named = call._asdict()
    stay = [name for name in wide if isinstance(named[name], Tensor) and named[name].dtype == torch.float32]
    return type(call)(**{name: value if name in stay else _cast(value, call[0].dtype) for name, value in named.items()})


def _autocast_on(first) -> bool:
    device = first.device.type if isinstance(first, Tensor) else None
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def _cast(value, dtype: torch.dtype):
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if narrow else value


def dropout_seed(device: torch.device, dropout_p: float) -> Tensor | None:
    """A fresh seed [1] from torch's generator of that device (so `torch.manual_seed` governs it), or None at p = 0."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device) if dropout_p > 0 else None
