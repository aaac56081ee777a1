"""Registration of an op with torch.library: schema, implementation, fake and autograd, from the class of its calls.

For an op `f`, `register` makes the raw operators `retro_kernels::f(<arguments>, str? backend)` and
`retro_kernels::f_backward`. The public functions check their arguments. Raw operators check resolved arguments, once
per layout, because sizes and integers become addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..compile import configs
from . import flops, plan, private, transforms
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
        call = problem(*args[:fields])
        with _full_precision(call), _on_device(call[0]):
            made = plan.of_resolved(op, call, args[fields], configs.epoch())
            outs = made.forward.run([call[at] for at in made.given])
        return outs if count > 1 else outs[0]

    def forward_fake(*args):
        outs = problem(*args[:fields]).empty_outputs()
        return outs if count > 1 else outs[0]

    def backward(*args):
        call, backend, needs = problem(*args[:fields]), args[fields], tuple(args[-1])
        saved = len(kept(problem))
        given = args[fields + 1 : -1]
        # A saved-tensor hook may return a layout that the chosen backend does not read.
        call, outs, grads = plan.readable(call, given[:saved], given[saved:])
        with _full_precision(call), _on_device(call[0]):
            made = plan.of_resolved(op, call, backend, configs.epoch())
            made.check_given_back(call, given)
            wanted = tuple([at in made.places and needs[made.places.index(at)] for at in range(len(made.tensors))])
            results = made.gradients((*[call[at] for at in made.tensors], *outs, *grads), wanted)
        places = zip(problem.DIFFERENTIABLE, made.places, needs, strict=True)
        listed = [(name, at) for name, at, needed in places if needed]
        return [torch.zeros_like(getattr(call, name)) if at is None else results[at] for name, at in listed]

    def backward_fake(*args):
        inputs = [getattr(problem(*args[:fields]), name) for name in problem.DIFFERENTIABLE]
        wanted = [x for x, needed in zip(inputs, args[-1], strict=True) if needed]
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted]

    def forward_transformed(*args):
        outs = transforms.forward(op, problem(*args[:fields]), args[fields])
        return outs if count > 1 else outs[0]

    def backward_transformed(*args):
        given, saved = args[fields + 1 : -1], len(kept(problem))
        call, needs = problem(*args[:fields]), tuple(args[-1])
        return list(transforms.backward(op, call, args[fields], given[:saved], given[saved:], needs))

    for name, run, fake, transformed in (
        (op, forward, forward_fake, forward_transformed),
        (f"{op}_backward", backward, backward_fake, backward_transformed),
    ):
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        _register_derivatives(name, transformed)
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


def _register_derivatives(name: str, transformed: Callable) -> None:
    """Let `transformed` serve the calls of an operator that autograd, forward mode or a transform tracks."""

    def differentiated(*args):
        if transforms.tracked(args):
            return transformed(*args)
        with private.below_autograd():
            return registered(name)(*args)

    def inside_transforms(*args):
        if private.functionalizing():
            return private.functionalized(registered(name), args)
        return transformed(*args)

    _LIBRARY.impl(name, differentiated, "Autograd")
    # The kernels below this key receive tensors that have lost their tangents and batch dimensions.
    _LIBRARY.impl(name, inside_transforms, "FuncTorchDynamicLayerFrontMode")


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
    """Draw a seed [1] from torch's generator of that device, which `torch.manual_seed` sets. None at p = 0.

    Compiled graphs contain the operator `dropout_seed`. The memory that it gets is new for each call, so that the
    compiler does not merge the seeds of two calls.
    """
    if dropout_p == 0:
        return None
    if torch.compiler.is_compiling():
        return registered("dropout_seed")(torch.empty(1, dtype=torch.int64, device=device))
    return _random_seed(torch.empty(0, device=device))


def _random_seed(like: Tensor) -> Tensor:
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=like.device)


def _saved_seed(like: Tensor) -> Tensor:
    """Draw a seed that a compiled backward pass reads from memory.

    A graph that recomputes activations would otherwise draw another seed, and so another mask, in its backward pass.
    """
    with private.saved_for_backward("dropout_p"), private.below_autograd():
        return registered("dropout_seed")(like)


_LIBRARY.define("dropout_seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("dropout_seed", _random_seed, _device)
_LIBRARY.impl("dropout_seed", _saved_seed, "Autograd")
_LIBRARY.impl("dropout_seed", _random_seed, "FuncTorchDynamicLayerFrontMode")  # vmap knows the rules of randint
torch.library.register_fake(
    f"{NAMESPACE}::dropout_seed", lambda like: torch.empty(1, dtype=torch.int64, device=like.device), lib=_LIBRARY
)


def registered(op: str, part: str = ""):
    """Return the registered operator, or its backward."""
    return getattr(torch.ops.retro_kernels, op + part)


def resolve(call):
    """Return the call checked, in autocast's types, with defaults filled in and, with dropout, a new seed."""
    call = cast(call).checked()
    if "seed" in call._fields:
        call = call._replace(seed=dropout_seed(call[0].device, call.dropout_p))
    return call
