"""In place of a CUDA graph where there is no GPU: operations are noted, and done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
#: what waits for the device, has a shape that depends on values, or brings values from the host
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
    """A function as a graph: like `torch.cuda.graph`, noting it leaves all memory as it was, and `replay` does it.

    Our ops are noted as the operators that they are; their plans follow from shapes and options alone.

    Raises:
        RuntimeError: the function does what a capture refuses, or a replay would have other shapes.
    """

    @staticmethod
    def warm(run: Callable[[], Tensor], device: torch.device) -> Tensor:
        return run()

    def __init__(self, run: Callable[[], Tensor], device: torch.device):
        super().__init__()
        self.steps: list[tuple] = []
        self._made: dict[int, Tensor] = {}  # storages that the function makes, kept
        self._found: dict[int, tuple] = {}  # those that it finds: the storage, and what it held
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
