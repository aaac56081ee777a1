"""Large blocks of memory of freed outputs and gradients, kept for later outputs of the same size.

malloc returns such blocks to the system (M_MMAP_THRESHOLD is 32 MiB at most). Each call would then take a page fault
for each page that it writes: a tenth to a third of the time of chunked cross-attention's backward pass, a twentieth of
its forward pass.
"""

from __future__ import annotations

import math
import os
import sys
import threading

import torch
from torch import Tensor

from .. import extensions
from ..core import private

FROM, KEPT = 4 << 20, 256 << 20  # bytes: of the smallest block, and of all blocks together

_blocks: list[torch.UntypedStorage] = []  # in use or free; the least recently taken one comes first
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held the lock


def keep(tensor: Tensor) -> None:
    """Keep the tensor's memory for reuse once it is free. If the blocks exceed KEPT, the free block that was
    least recently taken is dropped first.
    """
    if tensor.nbytes > KEPT:
        return
    with _lock:
        held = sum(block.nbytes() for block in _blocks) + tensor.nbytes
        while held > KEPT and (old := next(filter(_free, range(len(_blocks))), None)) is not None:
            held -= _blocks.pop(old).nbytes()
        if held <= KEPT:
            _blocks.append(tensor.untyped_storage())


def _free(at: int) -> bool:
    """Whether a block is free: no tensor uses the storage, and only the list and this call refer to it."""
    return private.storage_users(_blocks[at]) == 1 and sys.getrefcount(_blocks[at]) <= 2


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a large output that a kernel will fill: in a free block, or in huge pages where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    with _lock:
        for at in range(len(_blocks)):
            # a block shared with another process may be in use there
            if _blocks[at].nbytes() == size and _free(at) and not _blocks[at].is_shared():
                block = _blocks.pop(at)
                _blocks.append(block)
                return torch.empty(0, dtype=dtype, device="cpu").set_(block, 0, shape)
    tensor = torch.empty(shape, dtype=dtype)
    if extensions.unavailable("_cpu") is None:
        extensions.extension("_cpu").advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    keep(tensor)
    return tensor
