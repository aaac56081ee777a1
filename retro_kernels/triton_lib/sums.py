"""Sums of the partial gradients of several programs: in a fixed order, rounded once to the gradient's type."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core import layouts
from .launch import Scalars, launch, power_of_two

_MOST = 3  # sums of a launch
_PARTS, _TILE = 64, 2048  # most parts, and elements, of a tile
_SMALL = 8192  # elements of a gradient, like a bias, whose tile always has the most parts: so few kernels are compiled
_SIZES = ("count", "groups", "size", "part_size", "shift")
_NUMBERS = tuple(f"{name}_{i}" for i in range(_MOST) for name in _SIZES)
_POINTERS = tuple((f"part_{i}", f"out_{i}") for i in range(_MOST))


class Parts(NamedTuple):
    """Parts of the gradient of `like` [groups, rows, width]: the contiguous part [count, groups, part_rows, width].

    part_rows: by default the rows of `like`. Row r of `like` is row r + shift of a part, or 0 if the part has no such
    row.
    """

    part: Tensor
    like: Tensor
    groups: int = 1
    part_rows: int | None = None
    shift: int = 0


@triton.jit
def _sum(program, part_ptr, out_ptr, count, groups, size, part_size, shift, BLOCK_P: tl.constexpr, TILE: tl.constexpr):
    """out[group, x] = sum over p < count of part[p, group, x + shift]; elements outside a part are 0.

    The programs of a group follow each other. Another sum has the programs below 0 and from groups * blocks on.
    """
    BLOCK_X: tl.constexpr = TILE // BLOCK_P
    blocks = tl.cdiv(size, BLOCK_X)
    if program >= 0 and program < groups * blocks:
        group = (program // blocks).to(tl.int64)
        x = (program % blocks).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
        at = x + shift
        inside = (x < size) & (at >= 0) & (at < part_size)
        acc = tl.zeros([BLOCK_X], tl.float32)
        for first in range(0, count, BLOCK_P):
            p = first + tl.arange(0, BLOCK_P).to(tl.int64)
            pointers = part_ptr + ((p * groups)[:, None] + group) * part_size + at[None, :]
            acc += tl.sum(tl.load(pointers, mask=(p < count)[:, None] & inside[None, :], other=0.0), 0)
        tl.store(out_ptr + group * size + x, acc.to(out_ptr.dtype.element_ty), mask=x < size)
    return program - groups * blocks


@triton.jit(do_not_specialize=_NUMBERS)
def _sums_kernel(
    part_0, out_0, count_0, groups_0, size_0, part_size_0, shift_0,
    part_1, out_1, count_1, groups_1, size_1, part_size_1, shift_1,
    part_2, out_2, count_2, groups_2, size_2, part_size_2, shift_2,
    BLOCK_P_0: tl.constexpr, BLOCK_P_1: tl.constexpr, BLOCK_P_2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Up to three sums, one after the other in the grid. Those that are absent have no pointers."""
    program = tl.program_id(0)
    program = _sum(program, part_0, out_0, count_0, groups_0, size_0, part_size_0, shift_0, BLOCK_P_0, TILE)
    if part_1 is not None:
        program = _sum(program, part_1, out_1, count_1, groups_1, size_1, part_size_1, shift_1, BLOCK_P_1, TILE)
    if part_2 is not None:
        _sum(program, part_2, out_2, count_2, groups_2, size_2, part_size_2, shift_2, BLOCK_P_2, TILE)


def sum_parts(parts: dict[str, Parts]) -> dict[str, Tensor]:
    """Return the gradients, by the names of their parts. One launch makes up to three of them."""
    outs = {name: torch.empty_like(one.like, memory_format=torch.contiguous_format) for name, one in parts.items()}
    known, names = layouts.current(), tuple(parts)
    for at in range(0, len(names), _MOST):
        some, given = names[at : at + _MOST], {}
        for name, (part_ptr, out_ptr) in zip(some, _POINTERS):
            given[part_ptr], given[out_ptr] = parts[name].part, outs[name]
        launch(_sums_kernel, given, known.once(("sums", some), lambda: _scalars([parts[name] for name in some])))
    return outs


def _scalars(parts: list[Parts]) -> Scalars:
    """Return the scalars of a launch. The rows of a tile depend on one sum only, and so does the order of its sum."""
    arguments: dict = dict.fromkeys(_NUMBERS, 0) | dict.fromkeys(itertools.chain(*_POINTERS)) | {"TILE": _TILE}
    arguments |= {f"BLOCK_P_{i}": 0 for i in range(_MOST)}
    programs = 0
    for i, (part, like, groups, part_rows, shift) in enumerate(parts):
        width, size = like.shape[-1], like.numel() // groups
        part_size = size if part_rows is None else part_rows * width
        count = part.numel() // (groups * part_size)
        rows = _PARTS if size <= _SMALL else min(_PARTS, power_of_two(count, 1))
        values = count, groups, size, part_size, shift * width, rows
        arguments |= {f"{name}_{i}": value for name, value in zip((*_SIZES, "BLOCK_P"), values, strict=True)}
        programs += groups * -(-size // (_TILE // rows))
    return Scalars((programs,), arguments, num_warps=4, num_stages=1)
