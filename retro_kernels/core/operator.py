"""Registration of an op with torch.library: schema, implementation, fake and autograd, from the class of its calls.

For an op `f`, `register` makes the raw operators `retro_kernels::f(<arguments>, str? backend)` and
`retro_kernels::f_backward`. The public functions check their arguments. Raw operators check resolved arguments, once
per layout, because sizes and integers become addresses.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from . import arguments, flops, layouts, private, transforms
from .arguments import CALLS, kept
from .call import IMPLEMENTATIONS, operator

NAMESPACE = "retro_kernels"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
#: torch keeps compiled graphs on disk. They contain what these sources made of a call, so only equal sources read them.
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))))
torch.compiler.config.cache_key_tag += f" retro_kernels {SOURCES.hexdigest()[:12]}"
_SCHEMA_TYPE = {"Tensor": "Tensor", "int": "SymInt", "float": "float", "bool": "bool", "str": "str"}


def register(op: str, call_type: type, tangents: Callable[..., tuple[Tensor | None, ...]] | None = None) -> None:
    """Register `op`.

    call_type class of the op's calls, a NamedTuple whose fields are the arguments in the order of the schema.
              DIFFERENTIABLE, RETURNS: names of the differentiable inputs and of the outputs. KEPT: outputs that the
              backward pass reads, by default all. TWICE: gradients can be differentiated again. MOVES: position that
              changes from call to call, and `place(position)` returns the numbers that kernels take of it and what it
              decides. `checked()` returns the call checked, with defaults filled in; `empty_outputs()` the outputs, not
              filled; `flops()` the operations (forward, backward)
    tangents  (call, outputs, call of the inputs' tangents, backend) -> the outputs' tangents; None: no forward mode
    """
    CALLS[op] = call_type
    fields, declared, count = len(call_type._fields), schema(call_type), len(call_type.RETURNS)
    saved = len(kept(call_type))
    outputs = "".join(f"Tensor {name}, " for name in kept(call_type))
    grads = ", ".join(f"Tensor? grad_{name}" for name in call_type.RETURNS)
    result = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    LIBRARY.define(f"{op}({declared}, str? backend) -> {result}")
    LIBRARY.define(f"{op}_backward({declared}, str? backend, {outputs}{grads}, bool[] needs) -> Tensor[]")

    def forward(*args, known: layouts.Known | None = None):
        call = call_type(*args[:fields])
        with _full_precision(call), _on_device(call[0]):
            if known is None:
                first = functools.partial(arguments.known, op, call, args[fields])
                known = layouts.once((op, args[fields]), layouts.key(call), first)
            outs = tuple([out.contiguous() for out in layouts.within(known, known["backend"].forward, call)])
        return outs if count > 1 else outs[0]

    def forward_fake(*args):
        outs = call_type(*args[:fields]).empty_outputs()
        return outs if count > 1 else outs[0]

    def backward(*args, known: layouts.Known | None = None):
        call, backend, needs = call_type(*args[:fields]), args[fields], tuple(args[-1])
        given = args[fields + 1 : -1]
        with _full_precision(call), _on_device(call[0]):
            if known is None:
                both = layouts.key(call), layouts.key(given)
                first = functools.partial(arguments.known_backward, op, call, given, backend)
                known = layouts.once((op, "backward", backend), None if None in both else both, first)
            if not known["dense"]:
                call, given = arguments.readable(call, given)
            outs, grads = given[:saved], given[saved:]
            run = known["backend"].backward
            results = layouts.within(known.once(needs, layouts.Known), run, call, outs, grads, needs)
        return [grad.contiguous() for grad, needed in zip(results, needs, strict=True) if needed]

    def backward_fake(*args):
        inputs = [getattr(call_type(*args[:fields]), name) for name in call_type.DIFFERENTIABLE]
        wanted = [x for x, needed in zip(inputs, args[-1], strict=True) if needed]
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted]

    for name, run, fake, transformed in (
        (op, forward, forward_fake, transforms.forward),
        (f"{op}_backward", backward, backward_fake, transforms.backward),
    ):
        IMPLEMENTATIONS[name] = run
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        _register_derivatives(name, functools.partial(transformed, op))
    flops.register(op, call_type)
    if tangents is not None:
        transforms.FORWARD_MODE[op] = tangents


def schema(call_type: type) -> str:
    """Return the arguments of an op as a schema of `torch.library`: "Tensor x, SymInt? window, ...".

    >>> schema(CALLS["relative_logits"])
    'Tensor query, Tensor rel_key, SymInt key_len, SymInt rel_start, Tensor? position_bias, SymInt query_offset'
    """
    annotations = {name: call_type.__annotations__[name].__forward_arg__.split(" | ") for name in call_type._fields}
    return ", ".join(f"{_SCHEMA_TYPE[kind]}{'?' if rest else ''} {name}" for name, (kind, *rest) in annotations.items())


def _register_derivatives(name: str, transformed: Callable) -> None:
    """Let `transformed` serve the calls of an operator that autograd, forward mode or a transform tracks."""

    def differentiated(*args):
        flops.announce()  # raw operators and traced graphs come here first
        if transforms.tracked(args):
            return transformed(*args)
        with private.below_autograd():
            return operator(name)(*args)

    def inside_transforms(*args):
        if private.functionalizing():
            return private.functionalized(operator(name), args)
        return transformed(*args)

    LIBRARY.impl(name, differentiated, "Autograd")
    # The kernels below this key receive tensors that have lost their tangents and batch dimensions.
    LIBRARY.impl(name, inside_transforms, "FuncTorchDynamicLayerFrontMode")


def _full_precision(call) -> contextlib.AbstractContextManager:
    """Switch autocast off: it would narrow the float32 products of a backend."""
    device = call[0].device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU current, because kernels launch on the current device and its stream."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
