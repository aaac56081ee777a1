"""Host side of relative_logits: allocates and launches. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....compile import tiles
from ....compile.target import Target
from ....core import layouts
from ....triton_lib.launch import Scalars, launch, power_of_two, rel_table, strides
from ....triton_lib.sums import Parts, sum_parts
from ..call import RelativeLogits
from .kernels import _logits_forward_kernel, _logits_query_kernel, _logits_table_kernel

OP = "relative_logits"
_WAVES = 2  # programs per multiprocessor that the table's gradient is split into


def forward(call: RelativeLogits, target: Target) -> tuple[Tensor]:
    """Return the logits."""
    b, n, h, _ = call.query.shape
    (out,) = call.empty_outputs()

    def scalars() -> Scalars:
        tile = _tile(call, "forward", target)
        arguments = _arguments(call, tile)
        return Scalars.of_tile((-(-n // tile.block_m) * arguments["blocks"], h, b), arguments, tile)

    known = layouts.current().once("forward", scalars)
    launch(_logits_forward_kernel, _given(call) | {"out_ptr": out}, known)
    return (out,)


def backward(call: RelativeLogits, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return the gradients of the query, the table and the bias; None for those that are not needed."""
    (grad,) = grads
    need_query, need_table, need_bias = needs
    given = _given(call) | {"grad_ptr": grad}
    dquery, parts = None, {}
    if need_query or need_bias:
        dquery, part = _query_gradients(call, given, need_query, need_bias, target)
        if part is not None:
            parts["bias"] = Parts(part, call.position_bias)
    if need_table:
        parts["table"] = Parts(_table_gradient(call, given, target), call.rel_key)
    sums = sum_parts(parts)
    return [dquery, sums.get("table"), sums.get("bias")]


def _query_gradients(
    call: RelativeLogits, given: dict, need_query: bool, need_bias: bool, target: Target
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of the query, and the parts [B, query blocks, H, E] of the bias's gradient."""
    b, n, h, e = call.query.shape

    def scalars() -> tuple[int, Scalars]:
        tile = _tile(call, "query", target)
        count = -(-n // tile.block_m)
        arguments = _arguments(call, tile) | strides(given["grad_ptr"], "d", "bhn")
        return count, Scalars.of_tile((count, h, b), arguments, tile)

    count, known = layouts.current().once("query", scalars)
    device = call.query.device
    dquery = torch.empty(call.query.shape, dtype=call.query.dtype, device=device) if need_query else None
    part = torch.empty((b, count, h, e), dtype=torch.float32, device=device) if need_bias else None
    launch(_logits_query_kernel, given | {"dq_ptr": dquery, "bias_ptr": part}, known)
    return dquery, part


def _table_gradient(call: RelativeLogits, given: dict, target: Target) -> Tensor:
    """Return the parts [splits, H or 1, T, E] of the table's gradient."""
    e, (tables, rows, _) = call.query.shape[3], call.rel_key.shape
    splits, known = layouts.current().once("table", lambda: _table_scalars(call, given, target))
    part = torch.empty((splits, tables, rows, e), dtype=torch.float32, device=call.query.device)
    launch(_logits_table_kernel, given | {"drel_ptr": part}, known)
    return part


def _table_scalars(call: RelativeLogits, given: dict, target: Target) -> tuple[int, Scalars]:
    """Return the number of parts of the table's gradient, and the scalars of its kernel."""
    b, _, h, _ = call.query.shape
    tables, rows, _ = call.rel_key.shape
    tile = _tile(call, "table", target)
    items, count = b * h // tables, -(-rows // tile.block_n)
    splits = min(items, -(-_WAVES * target.multiprocessors // (count * tables)))
    per_split = -(-items // splits)
    splits = -(-items // per_split)
    arguments = _arguments(call, tile) | strides(given["grad_ptr"], "d", "bhn")
    arguments |= {"items": items, "items_per_split": per_split, "heads_per_table": h // tables}
    return splits, Scalars.of_tile((count, tables, splits), arguments, tile)


def _tile(call: RelativeLogits, kernel: str, target: Target) -> tiles.Tile:
    _, n, _, e = call.query.shape
    query = tiles.TileQuery(kernel, call.query.element_size(), power_of_two(e), n, call.key_len)
    return tiles.choose_tile(OP, query, target)


def _given(call: RelativeLogits) -> dict:
    """Return the tensors of the call, and the number that moves with its position."""
    tensors = {"q_ptr": call.query, "rel_ptr": call.rel_key, "position_ptr": call.position_bias}
    return tensors | call.place(call.query_offset)[0]


def _arguments(call: RelativeLogits, tile: tiles.Tile) -> dict:
    """Return the scalars of all kernels that follow from the call and the tile."""
    _, n, h, e = call.query.shape
    blocks = -(-(call.key_len + tile.block_m - 1) // tile.block_n)  # of displacements between block_m queries and keys
    sizes = {"N": n, "S": call.key_len, "H": h, "blocks": blocks, "E": e, "BLOCK_E": power_of_two(e)}
    return strides(call.query, "q", "bnh") | rel_table(call.rel_key) | strides(call.position_bias, "p", "h") | sizes
