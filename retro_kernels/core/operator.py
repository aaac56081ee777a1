"""Registration of an op with torch.library: schema, implementation, fake and autograd, from the class of its calls.

For an op `f`, `register` makes the raw operators `retro_kernels::f(<arguments>, str? backend)` and
`retro_kernels::f_backward`. The public functions check their arguments. Raw operators check resolved arguments, once
per layout, because sizes and integers become addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..compile import configs
from . import flops, plan, transforms
from .arguments import CALLS, cast, kept

NAMESPACE = "retro_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCHEMA_TYPE = {"Tensor": "Tensor", "int": "SymInt", "float": "float", "bool": "bool", "str": "str"}


def register(op: str, problem: type, tangents: Callable[..., tuple[Tensor | None, ...]] | None = None) -> None:
    """Register `op`.

    problem   class of the op's calls, a NamedTuple whose fields are the arguments in the order of the schema.
              DIFFERENTIABLE, RETURNS: names of the differentiable inputs and of the outputs. KEPT: outputs that the
              backward pass reads, by default all. TWICE: gradients can be differentiated again. MOVES: position that
              changes from call to call, and `movable()` its range. `checked()` returns the call checked, with defaults
              filled in; `empty_outputs()` the outputs, not filled; `flops()` the operations (forward, backward)
    tangents  (call, outputs, call of the inputs' tangents, backend) -> the outputs' tangents; None: no forward mode
    """
    CALLS[op] = problem
    fields, arguments, count = len(problem._fields), schema(problem), len(problem.RETURNS)
    outputs = "".join(f"Tensor {name}, " for name in kept(problem))
    grads = ", ".join(f"Tensor? grad_{name}" for name in problem.RETURNS)
    result = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    _LIBRARY.define(f"{op}({arguments}, str? backend) -> {result}")
    _LIBRARY.define(f"{op}_backward({arguments}, str? backend, {outputs}{grads}, bool[] needs) -> Tensor[]")

    def forward(*args):
        transforms.refuse_tangents(op, args)
        call = problem(*args[:fields])
        with _full_precision(call), _on_device(call[0]):
            made = plan.of_resolved(op, call, args[fields], configs.epoch())
            outs = made.forward.run([call[at] for at in made.given])
        return outs if count > 1 else outs[0]

    def forward_fake(*args):
        transforms.refuse_tangents(op, args)
        outs = problem(*args[:fields]).empty_outputs()
        return outs if count > 1 else outs[0]

    def backward(*args):
        transforms.refuse_tangents(op, args)
        call, backend, needs = problem(*args[:fields]), args[fields], tuple(args[-1])
        given = args[fields + 1 : -1]
        with _full_precision(call), _on_device(call[0]):
            made = plan.of_resolved(op, call, backend, configs.epoch())
            made.check_given_back(call, given)
            wanted = tuple([at in made.places and needs[made.places.index(at)] for at in range(len(made.tensors))])
            results = made.gradients((*[call[at] for at in made.tensors], *given), wanted)
        places = zip(problem.DIFFERENTIABLE, made.places, needs, strict=True)
        listed = [(name, at) for name, at, needed in places if needed]
        return [torch.zeros_like(getattr(call, name)) if at is None else results[at] for name, at in listed]

    def backward_fake(*args):
        inputs = [getattr(problem(*args[:fields]), name) for name in problem.DIFFERENTIABLE]
        wanted = [x for x, needed in zip(inputs, args[-1], strict=True) if needed]
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted]

    for name, run, fake in ((op, forward, forward_fake), (f"{op}_backward", backward, backward_fake)):
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    _register_autograd(op, problem)
    flops.register(op, problem)
    if tangents is not None:
        transforms.FORWARD_MODE[op] = tangents


def schema(problem: type) -> str:
    """Return the arguments of an op as a schema of `torch.library`: "Tensor x, SymInt? window, ...".

    >>> schema(CALLS["relative_logits"])
    'Tensor query, Tensor rel_key, SymInt key_len, SymInt rel_start, Tensor? position_bias, SymInt query_offset'
    """
    annotations = {name: problem.__annotations__[name].__forward_arg__.split(" | ") for name in problem._fields}
    return ", ".join(f"{_SCHEMA_TYPE[kind]}{'?' if rest else ''} {name}" for name, (kind, *rest) in annotations.items())


def _register_autograd(op: str, problem: type) -> None:
    fields, saves = len(problem._fields), kept(problem)
    where = [problem._fields.index(name) for name in problem.DIFFERENTIABLE]

    def setup_context(ctx, inputs, output):
        outs = output if isinstance(output, tuple) else (output,)
        outs = [outs[problem.RETURNS.index(name)] for name in saves]
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, *outs)
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.layouts = layouts((*tensors, *outs))
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *grads):
        grads_in = [None] * (fields + 1)
        needs = [ctx.needs_input_grad[i] for i in where]
        if not any(needs) or all(g is None for g in grads):
            return tuple(grads_in)
        saved = ctx.saved_tensors
        transforms.refuse_batched(op, grads)
        check_saved(op, (*problem._fields, "backend", *saves), saved, ctx.layouts)
        args = [option if t is None else t for t, option in zip(saved[: fields + 1], ctx.options, strict=True)]
        results = iter(registered(op, "_backward")(*args, *saved[fields + 1 :], *grads, needs))
        for i, needed in zip(where, needs, strict=True):
            grads_in[i] = next(results) if needed else None
        return tuple(grads_in)

    def no_second_derivative(ctx, *grads):
        raise transforms.no_second_derivative(op)

    name = f"{NAMESPACE}::{op}"
    torch.library.register_autograd(name, differentiate, setup_context=setup_context, lib=_LIBRARY)
    torch.library.register_autograd(f"{name}_backward", no_second_derivative, lib=_LIBRARY)


def layouts(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """Return type, shape, device and layout of each tensor. Those of saved tensors must not change."""
    return [None if x is None else (x.dtype, x.shape, x.device, x.layout) for x in tensors]


def check_saved(op: str, names: Sequence[str], saved: Sequence[Tensor | None], expected: list[tuple | None]) -> None:
    """Raise where a saved-tensor hook returned a tensor of another layout."""
    found = layouts(saved)
    if found == expected:
        return
    name, got, was = next(three for three in zip(names, found, expected, strict=True) if three[1] != three[2])
    got, was = (f"{dtype} {list(shape)} on {device} ({layout})" for dtype, shape, device, layout in (got, was))
    raise RuntimeError(f"retro_kernels.{op}: a saved-tensor hook returned {name} as {got}; it was saved as {was}")


def _full_precision(call) -> contextlib.AbstractContextManager:
    """Switch autocast off: it would narrow the float32 products of a backend."""
    device = call[0].device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU current, because kernels launch on the current device and its stream."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def dropout_seed(device: torch.device, dropout_p: float) -> Tensor | None:
    """Draw a seed [1] from torch's generator of that device, which `torch.manual_seed` sets. None at p = 0."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device) if dropout_p > 0 else None


def registered(op: str, part: str = ""):
    """Return the registered operator, or its backward."""
    return getattr(torch.ops.retro_kernels, op + part)


def resolve(call):
    """Return the call checked, in autocast's types, with defaults filled in and, with dropout, a new seed."""
    call = cast(call).checked()
    if "seed" in call._fields:
        call = call._replace(seed=dropout_seed(call[0].device, call.dropout_p))
    return call
