"""Products of float32 matrices (csrc/cpu/matmul.cpp): no op of the package, but what the linear maps of models need."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import native
from . import empty


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias, [M,N] of a [M,K], b [K,N] and bias [N], float32: rows or columns lie together, others are copied."""
    out = empty((a.shape[0], b.shape[1]), torch.float32)
    tensors = (_strided(a), _strided(b), bias, out)  # alive until the kernel is done
    native.extension("_cpu").matmul(*map(native.view, tensors), torch.get_num_threads())
    return out


def _strided(x: Tensor) -> Tensor:
    return x if 1 in x.stride() else x.contiguous()
