"""Calls of compiled functions: tensors are passed as views."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import extensions
from ..core import layouts


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

    Tensors are passed as views, an op's call as a tuple. A pass calls a function once, and the layout of its call
    determines the types, sizes and strides of all tensors that the function takes.
    """
    views = layouts.current().once(("views", name), lambda: _view(arguments))
    getattr(extensions.extension("_cpu"), name)(*_passed(arguments, views), torch.get_num_threads())


def _view(value):
    """Return the type code, sizes and strides of a tensor, a list for a tuple, and None for any other value."""
    if isinstance(value, Tensor):
        return extensions.layout(value.dtype, value.shape, value.stride())
    if isinstance(value, Seen):
        return extensions.layout(value.tensor.dtype, value.shape, value.strides)
    return [_view(x) for x in value] if isinstance(value, tuple) else None


def _passed(values: tuple, views: list) -> tuple:
    """Return arguments for C++, the tensors as address, type code, sizes and strides."""
    return tuple([value if view is None else _argument(value, view) for value, view in zip(values, views)])


def _argument(value, view):
    if view.__class__ is list:
        return _passed(value, view)
    tensor = value.tensor if value.__class__ is Seen else value
    return tensor.data_ptr(), *view
