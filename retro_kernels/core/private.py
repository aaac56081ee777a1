"""All private names of torch that the package uses, with public fallbacks for versions that lack them.

Tested with torch 2.11 to 2.13. Where torch lacks a name, eager calls go through the registered operator.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_leaves

__all__ = ["dispatch_modes", "tree_leaves"]


def _of_torch(name: str, otherwise):
    """Return a name inside torch._C, or the public fallback."""
    try:
        return operator.attrgetter(name)(torch._C)
    except AttributeError:
        return otherwise


#: device type -> allocator of torch's compiler, (shape, strides, dtype) -> tensor; it takes half of torch.empty's time
EMPTY = {
    device: _of_torch(
        f"_dynamo.guards._empty_strided_{device}",
        lambda shape, strides, dtype, device=device: torch.empty_strided(shape, strides, dtype=dtype, device=device),
    )
    for device in ("cpu", "cuda")
}
#: address of a storage -> number of tensors that use it; None: torch has no such function
_storage_users = _of_torch("_storage_Use_Count", None)
storages_tell = _storage_users is not None

#: whether autocast is on for any device
autocast = _of_torch("_is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, ("cpu", "cuda"))))


class DispatchMode(TorchDispatchMode):
    """Dispatch mode that is never compiled. For any other mode torch imports its compiler: a second of CPU time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _NoKeys:
    raw_repr = staticmethod(lambda: 0)


#: tensor -> its dispatch keys, whose `raw_repr()` is a number
dispatch_keys = _of_torch("_dispatch_keys", lambda tensor: _NoKeys)
_guards = _of_torch("_dynamo.guards.TensorGuards", None)
_interpreter = _of_torch("_functorch.peek_interpreter_stack", lambda: None)
_functionalize = _of_torch("_functorch.TransformType.Functionalize", None)
#: whether `is_grads_batched` made a tensor
is_batched = _of_torch("_functorch.is_legacy_batchedtensor", lambda tensor: False)
_tangents_on = _of_torch("_is_fwd_grad_enabled", lambda: True)
_LISTENERS = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_tracing_state", "_dispatch_keys")
_dispatched, _overridden, _traced, _ = (_of_torch(name, None) for name in _LISTENERS)
#: whether this torch has every name that tells whether something listens to a call
_tells = (
    all(hasattr(torch._C, name) for name in _LISTENERS)
    and hasattr(torch.autograd, "_profiler_enabled")
    and hasattr(forward_ad, "_current_level")
)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors that use a storage."""
    return _storage_users(storage._cdata)


def like(tensors) -> Callable[..., bool]:
    """Return a compiled check that tensors have the types, shapes and devices of these.

    It may return False for tensors that have them. It takes a quarter of the time of the same check in Python.
    """
    if _guards is None:
        return lambda *_: False
    return _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def unheard() -> bool:
    """Whether no mode, transform, tracer or profiler is on. False if this torch can't tell."""
    return (
        _tells
        and _dispatched() == 0
        and _overridden() == 0
        and _interpreter() is None
        and _traced() is None
        and forward_ad._current_level < 0
        and not torch.autograd._profiler_enabled()
    )


def untraced() -> bool:
    """Whether no tracer, dispatch mode or transform is on. False if this torch can't tell."""
    return _tells and _dispatched() == 0 and _traced() is None and _interpreter() is None


def functionalizing() -> bool:
    """Whether the innermost transform is `func.functionalize`."""
    interpreter = _interpreter()
    return interpreter is not None and interpreter.key() == _functionalize


def functionalized(function: Callable, args: tuple):
    """Call a function that has no side effects below `func.functionalize`, on unwrapped tensors."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    level = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())
    with level.redispatch_to_next():
        outs = function(*level.unwrap_tensors(args))
    return level.wrap_tensors(outs)


#: context inside which torch calls the kernel of an operator below its autograd kernel
below_autograd = torch._C._AutoDispatchBelowAutograd


@contextlib.contextmanager
def saved_for_backward(argument: str):
    """Context manager: a graph that is compiled keeps the results of these operators instead of recomputing them.

    Raises: RuntimeError naming the argument if the compiler is told to keep the graph's inputs only.
    """
    from torch._functorch import config
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    meta = traceback.current_meta
    if "recompute" in meta:  # Activation checkpointing restores the random state itself.
        yield
        return
    if config.activation_memory_budget == 0 and traceback.has_preserved_node_meta():
        why = "the backward pass would draw another mask; set a budget above 0"
        raise RuntimeError(f"{argument}: expected 0 with {config.__name__}.activation_memory_budget = 0, because {why}")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        del meta["recompute"]


def watched(values, ordinary: frozenset[type]) -> bool:
    """Whether a compiler or transform is on, or a value's class is not in `ordinary`."""
    if torch.compiler.is_compiling():  # first, because the compiler can't trace the other conditions
        return True
    interpreter = _interpreter()
    if getattr(forward_ad, "_current_level", -1) >= 0 if interpreter is None else interpreter.key() != _functionalize:
        return True
    return any([value.__class__ not in ordinary for value in values])


def may_have_tangents() -> bool:
    """Whether forward mode is on."""
    return getattr(forward_ad, "_current_level", 0) >= 0 and _tangents_on()


def autograd_on() -> contextlib.AbstractContextManager:
    """Switch autograd on inside an operator's implementation, where torch has switched it off."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys)
