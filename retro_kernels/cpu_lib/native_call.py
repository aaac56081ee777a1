"""Calls of compiled functions: tensors are passed as views."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import extensions


class Seen(NamedTuple):
    """A tensor's memory under other sizes and strides, for a compiled function."""

    tensor: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def rows(x: Tensor) -> Seen:
    """View a contiguous x [...,K] as a matrix."""
    width = x.shape[-1]
    return Seen(x, (x.numel() // width, width), (width, 1))


def flat(x: Tensor) -> Seen:
    """View a contiguous x as a vector."""
    return Seen(x, (x.numel(),), (1,))


def call(name: str, *arguments) -> None:
    """Call a function of the CPU extension. Its last argument, the number of threads, is added here.

    Tensors are passed as views, an op's call as a tuple.
    """
    getattr(extensions.extension("_cpu"), name)(*[_passed(value) for value in arguments], torch.get_num_threads())


def _passed(value):
    if isinstance(value, Tensor):
        return extensions.view(value)
    if isinstance(value, Seen):
        return value.tensor.data_ptr(), *extensions.layout(value.tensor.dtype, value.shape, value.strides)
    return tuple([_passed(x) for x in value]) if isinstance(value, tuple) else value
