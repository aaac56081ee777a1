"""Merge of partial attentions over disjoint sets of keys, for calls whose keys are split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core import layouts
from .launch import Scalars, launch, power_of_two
from .softmax import LOG2E

_STEP = 8  # parts that the merge loads at a time


def merge_splits(parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the partial attentions of several splits of the keys into out and lse."""
    b, n, h, d = out.shape
    tensors = {"part_ptr": parts, "part_lse_ptr": part_lses, "out_ptr": out, "lse_ptr": lse}

    def scalars() -> Scalars:
        sizes = {"N": n, "H": h, "splits": len(parts), "D": d, "BLOCK_D": power_of_two(d), "BLOCK_S": _STEP}
        return Scalars((n * h, b), sizes, num_warps=1, num_stages=1)

    launch(_merge_kernel, tensors, layouts.current().once("merge_splits", scalars))


def outputs_of_splits(out: Tensor, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of `count` splits of the keys: out and lse themselves for one, else float32 scratch memory."""
    if count == 1:
        return out, lse
    parts, part_lses = ((count, *x.shape) for x in (out, lse))
    return tuple(torch.empty(shape, dtype=torch.float32, device=out.device) for shape in (parts, part_lses))


@triton.jit(do_not_specialize=("N", "H", "splits"))
def _merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr,
    N, H, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out and lse of one (token, head) and batch, merged from `splits` disjoint sets of keys by their lse."""
    n, head, batch = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    column, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        inside = first + s < splits
        part = (first + s) * tl.num_programs(1) + batch
        lse = tl.load(part_lse_ptr + (part * H + head) * N + n, mask=inside, other=float("-inf"))
        x = tl.load(
            part_ptr + ((part * N + n) * H + head)[:, None] * D + column[None, :],
            mask=inside[:, None] & (column < D)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2((lse - shift) * LOG2E)
        alpha = tl.exp2((row_max - shift) * LOG2E)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        row_max = new_max
    some = row_sum != 0  # NaN must stay NaN
    safe = tl.where(some, row_sum, 1.0)
    out_at = out_ptr + ((batch * N + n) * H + head) * D + column
    tl.store(out_at, (acc / safe).to(out_ptr.dtype.element_ty), mask=column < D)
    tl.store(lse_ptr + (batch * H + head) * N + n, tl.where(some, row_max + tl.log(safe), float("-inf")))
