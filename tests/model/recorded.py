"""Stand-in for a CUDA graph: records operations and runs them again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
#: operators that wait for the device, have shapes that depend on values, or copy values from the host
REFUSED = (
    _ATEN._local_scalar_dense,
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN._unique2,
    _ATEN.unique_consecutive,
    _ATEN.unique_dim,
    _ATEN.lift_fresh,
)


class Recorded(TorchDispatchMode):
    """A function as a graph. Like `torch.cuda.graph`, recording leaves all memory unchanged, and `replay` executes.

    Ops of the package are recorded as operators; their plans follow from shapes and options alone. Raises:
    RuntimeError: the function does something that a capture refuses, or a replay has other shapes.
    """

    @staticmethod
    def warm(run: Callable[[], Tensor], device: torch.device) -> Tensor:
        return run()

    def __init__(self, run: Callable[[], Tensor], device: torch.device):
        super().__init__()
        self.steps: list[tuple] = []
        self._made: dict[int, Tensor] = {}  # storages that the function allocates
        self._found: dict[int, tuple] = {}  # storages that existed before, with their content
        with self:
            self.result = run()
        for storage, held in self._found.values():
            storage.copy_(held)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masks = operation.overloadpacket is _ATEN.index and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if operation.overloadpacket in REFUSED or masks:
            raise RuntimeError(f"{operation}: no graph can hold it")
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made and storage.data_ptr() not in self._found:
                self._found[storage.data_ptr()] = storage, storage.clone()
        out = operation(*args, **kwargs)
        outs = _tensors(out)
        for tensor in outs:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._found:
                self._made[address] = tensor
        self.steps.append((operation, args, kwargs, outs))
        return out

    def replay(self) -> Tensor:
        for operation, args, kwargs, outs in self.steps:
            for held, new in zip(outs, _tensors(operation(*args, **kwargs)), strict=True):
                if held.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    if held.shape != new.shape:
                        raise RuntimeError(f"{operation}: {list(new.shape)} in place of {list(held.shape)}")
                    held.copy_(new)
        return self.result


def _tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
