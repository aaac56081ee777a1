"""All private names of torch that the package uses. Tested with torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

__all__ = ["dispatch_modes"]

_interpreter = torch._C._functorch.peek_interpreter_stack
#: whether `is_grads_batched` made a tensor
is_batched = torch._C._functorch.is_legacy_batchedtensor
dispatch_keys, _Keys, _Key = torch._C._dispatch_keys, torch._C.DispatchKeySet, torch._C.DispatchKey


def _ordinary() -> Iterator[int]:
    """Yield the dispatch keys of dense tensors on the CPU and on a GPU, made under inference mode or not."""
    for device in ("CPU", "CUDA"):
        keys = _Keys(getattr(_Key, device)).add(getattr(_Key, f"Autocast{device}"))
        yield keys.raw_repr()
        yield keys.add(_Key.ADInplaceOrView).add(getattr(_Key, f"Autograd{device}")).raw_repr()


#: `dispatch_keys(tensor).raw_repr()` of tensors that are neither wrapped nor computed when they are read
ORDINARY = frozenset(_ordinary())


def untraced() -> bool:
    """Whether no tracer, dispatch mode or transform is on."""
    return torch._C._len_torch_dispatch_stack() == 0 and not torch.jit.is_tracing() and _interpreter() is None


def transformed() -> bool:
    """Whether a transform or forward mode is on."""
    return _interpreter() is not None or forward_ad._current_level >= 0


def undisturbed() -> bool:
    """Whether torch's dispatcher would only call the implementation of an operator on ordinary tensors."""
    return untraced() and forward_ad._current_level < 0


def profiled() -> bool:
    """Whether a profiler of torch is on. It records operators, but not their implementations."""
    return torch.autograd.profiler._is_profiler_enabled


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors that use a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def functionalizing() -> bool:
    """Whether the innermost transform is `func.functionalize`."""
    interpreter = _interpreter()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Functionalize


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


def may_have_tangents() -> bool:
    """Whether forward mode is on."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def autograd_on() -> contextlib.AbstractContextManager:
    """Switch autograd on inside an operator's implementation, where torch has switched it off."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys)
