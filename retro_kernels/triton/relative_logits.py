"""Position logits alone, skewed by addresses: the triton backend of `retro_kernels.relative_logits`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import configs
from .._problem import KERNEL_DTYPES, RelativeLogits
from .._target import Target, current_target
from ..aot import Case
from . import unsupported
from ._launch import Launch, power_of_two, strides
from ._relative_logits_kernels import _logits_forward_kernel, _logits_query_kernel, _logits_table_kernel

OP = "relative_logits"
_WAVES = 2  # programs per multiprocessor that the splits of the table's gradient aim at
_MAX_GRID = 65535  # CUDA's limit on the second and third grid dimension


def reason(call: RelativeLogits) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if max(call.query.shape[0], call.query.shape[2]) > _MAX_GRID:
        return f"B={call.query.shape[0]} or H={call.query.shape[2]} exceeds {_MAX_GRID}"
    if call.key_len == 0:
        return "key_len is 0"
    return unsupported({name: getattr(call, name) for name in RelativeLogits.DIFFERENTIABLE})


def forward(call: RelativeLogits) -> tuple[Tensor]:
    """logits [B,H,N,key_len] in the query's type."""
    out, launch = plan_forward(call, current_target(call.query.device))
    launch.run()
    return (out,)


def backward(call: RelativeLogits, outputs, grads, needs) -> list[Tensor | None]:
    """dq from one pass over the gradient, the table's from another; sums across programs are stored apart and then added in order."""
    if grads[0] is None:
        return [torch.zeros_like(getattr(call, name)) if need else None for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)]
    target = current_target(call.query.device)
    dq, drel, bias, launches = plan_backward(call, grads[0], needs, target)
    for launch in launches:
        launch.run()
    dtype = call.query.dtype
    return [dq, None if drel is None else drel.sum(0).to(dtype), None if bias is None else bias.sum((0, 1)).to(dtype)]


def plan_forward(call: RelativeLogits, target: Target) -> tuple[Tensor, Launch]:
    """out (not filled yet) and the launch that fills it."""
    b, n, h, _ = call.query.shape
    tile = _tile(call, "forward", target)
    out = torch.empty((b, h, n, call.key_len), dtype=call.query.dtype, device=call.query.device)
    blocks = _blocks(call, tile)
    arguments = {
        "q_ptr": call.query, **strides(call.query, "q", "bnh"), **_table(call), **_bias(call), "out_ptr": out, **_sizes(call),
        "H": h, "blocks": blocks, **_constants(call, tile),
    }  # fmt: skip
    return out, Launch(_logits_forward_kernel, (-(-n // tile.block_m) * blocks, h, b), arguments, tile.num_warps, tile.num_stages)


def plan_backward(call: RelativeLogits, grad: Tensor, needs, target: Target):
    """dq, drel [splits, H or 1, T, E], sums of dq [B, blocks, H, E] (None where not needed) and the launches."""
    b, n, h, e = call.query.shape
    tables, rows, _ = call.rel_key.shape
    device, wide = call.query.device, torch.float32
    gradient = {"grad_ptr": grad, **strides(grad, "d", "bhn")}
    launches, dq, drel, bias = [], None, None, None
    if needs[0] or needs[2]:
        tile = _tile(call, "query", target)
        count = -(-n // tile.block_m)
        dq = torch.empty(call.query.shape, dtype=call.query.dtype, device=device) if needs[0] else None
        bias = torch.empty((b, count, h, e), dtype=wide, device=device) if needs[2] else None
        arguments = {**gradient, **_table(call), "dq_ptr": dq, "bias_ptr": bias, **_sizes(call), "H": h, "blocks": _blocks(call, tile)}
        arguments |= _constants(call, tile)
        launches.append(Launch(_logits_query_kernel, (count, h, b), arguments, tile.num_warps, tile.num_stages))
    if needs[1]:
        tile = _tile(call, "table", target)
        items, count = b * h // tables, -(-rows // tile.block_n)
        splits = min(items, -(-_WAVES * target.multiprocessors // (count * tables)))
        per_split = -(-items // splits)
        splits = -(-items // per_split)
        drel = torch.empty((splits, tables, rows, e), dtype=wide, device=device)
        arguments = {
            **gradient, "q_ptr": call.query, **strides(call.query, "q", "bnh"), **_bias(call), "drel_ptr": drel, **_sizes(call),
            "items": items, "items_per_split": per_split, "heads_per_table": h // tables, **_constants(call, tile),
        }  # fmt: skip
        launches.append(Launch(_logits_table_kernel, (count, tables, splits), arguments, tile.num_warps, tile.num_stages))
    return dq, drel, bias, launches


def _tile(call: RelativeLogits, kernel: str, target: Target) -> configs.Tile:
    _, n, _, e = call.query.shape
    return configs.choose(OP, configs.Problem(kernel, call.query.element_size(), power_of_two(e), n, call.key_len), target)


def _blocks(call: RelativeLogits, tile: configs.Tile) -> int:
    """Blocks of displacements that block_m queries and all keys have between them."""
    return -(-(call.key_len + tile.block_m - 1) // tile.block_n)


def _table(call: RelativeLogits) -> dict:
    found = strides(call.rel_key, "r", "ht")
    if call.rel_key.shape[0] == 1:
        found["stride_rh"] = 0  # one table for all heads
    return {"rel_ptr": call.rel_key, **found}


def _bias(call: RelativeLogits) -> dict:
    return {"position_ptr": call.position_bias, **strides(call.position_bias, "p", "h")}


def _sizes(call: RelativeLogits) -> dict:
    n, shift = call.query.shape[1], call.query_offset - call.rel_start
    return {"N": n, "S": call.key_len, "T": call.rel_key.shape[1], "shift": shift}


def _constants(call: RelativeLogits, tile: configs.Tile) -> dict:
    e = call.query.shape[-1]
    return {"E": e, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_E": power_of_two(e), "PRECISION": tile.precision}


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, wide and narrow relative keys."""
    for name, (tables, e) in {"wide": (16, 128), "head": (16, 64), "narrow": (1, 16)}.items():
        for dtype in KERNEL_DTYPES:
            query = torch.empty((2, 2048, 16, e), dtype=dtype, device="meta")
            rel_key = torch.empty((tables, 4095, e), dtype=dtype, device="meta")
            call = RelativeLogits(query, rel_key, 2048, -2047, torch.empty((16, e), dtype=dtype, device="meta"), 0)
            out, launch = plan_forward(call, target)
            for each in (launch, *plan_backward(call, out, (True, True, True), target)[-1]):
                yield Case(name, str(dtype).removeprefix("torch."), each)
