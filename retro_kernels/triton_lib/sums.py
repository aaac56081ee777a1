"""Sums of the partial gradients of several programs: in a fixed order, rounded once to the gradient's type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core import layouts
from .launch import Scalars, launch, power_of_two

_PARTS, _TILE = 64, 2048  # most parts, and elements, of a tile; few columns, because a gradient is often small


@triton.jit(do_not_specialize=("count", "size", "part_size", "shift"))
def _sum_kernel(
    part_ptr,
    out_ptr,
    stride_part,
    stride_group,
    count,
    size,
    part_size,
    shift,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """out[group, x] = sum over p < count of part[p, group, x + shift]; elements outside a part are 0."""
    x = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    group = tl.program_id(1).to(tl.int64)
    at = x + shift
    inside = (x < size) & (at >= 0) & (at < part_size)
    acc = tl.zeros([BLOCK_X], tl.float32)
    for first in range(0, count, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P).to(tl.int64)
        pointers = part_ptr + p[:, None] * stride_part + group * stride_group + at[None, :]
        acc += tl.sum(tl.load(pointers, mask=(p < count)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(out_ptr + group * size + x, acc.to(out_ptr.dtype.element_ty), mask=x < size)


def sum_parts(part: Tensor, like: Tensor, groups: int = 1, part_rows: int | None = None, shift: int = 0) -> Tensor:
    """Return the gradient of `like` [groups, rows, width]: the sum of the contiguous
    part [count, groups, part_rows, width].

    part_rows: by default the rows of `like`. Row r of `like` is row r + shift of a part, or 0 if the part has no such
    row.
    """
    width = like.shape[-1]
    out = torch.empty_like(like, memory_format=torch.contiguous_format)

    def scalars() -> Scalars:
        size = like.numel() // groups
        part_size = size if part_rows is None else part_rows * width
        count = part.numel() // (groups * part_size)
        rows = min(_PARTS, power_of_two(count, 1))
        sizes = {"stride_part": groups * part_size, "stride_group": part_size}
        sizes |= {"count": count, "size": size, "part_size": part_size, "shift": shift * width}
        sizes |= {"BLOCK_P": rows, "BLOCK_X": _TILE // rows}
        return Scalars((-(-size // (_TILE // rows)), groups), sizes, num_warps=4, num_stages=1)

    name = "sum_parts", part.shape, part.dtype, like.shape, like.dtype, groups, part_rows, shift
    launch(_sum_kernel, {"part_ptr": part, "out_ptr": out}, layouts.current().once(name, scalars))
    return out
