"""Host side of relative_logits: the launches of a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import torch

from ....compile import configs
from ....compile.target import Target
from ....core.steps import derived
from ....triton_lib.launch import of_tile, power_of_two, strided, table
from ....triton_lib.plan import Plan
from ....triton_lib.sums import summed
from ..call import RelativeLogits
from .kernels import _logits_forward_kernel, _logits_query_kernel, _logits_table_kernel

OP = "relative_logits"
_WAVES = 2  # programs per multiprocessor that the table's gradient is split into


def forward(call: RelativeLogits, target: Target) -> Plan:
    """Plan the logits."""
    b, n, h, _ = call.query.shape
    tile = _tile(call, "forward", target)
    (out,) = call.empty_outputs()
    arguments = _arguments(call, tile) | {"out_ptr": out}
    grid = (-(-n // tile.block_m) * arguments["blocks"], h, b)
    return Plan([of_tile(_logits_forward_kernel, grid, arguments, tile)], (out,))


def backward(call: RelativeLogits, outputs, grads, needs, target: Target) -> Plan:
    """Plan dq, and partial sums of the gradients of the table [splits, H or 1, T, E] and the bias [B, blocks, H, E]."""
    (grad,) = grads
    b, n, h, e = call.query.shape
    tables, rows, _ = call.rel_key.shape
    device = call.query.device
    gradient = strided("grad", grad, "d", "bhn")
    launches, dq, drel, dbias = [], None, None, None
    if needs[0] or needs[2]:
        tile = _tile(call, "query", target)
        count = -(-n // tile.block_m)
        dq = torch.empty(call.query.shape, dtype=call.query.dtype, device=device) if needs[0] else None
        bias = torch.empty((b, count, h, e), dtype=torch.float32, device=device) if needs[2] else None
        arguments = _arguments(call, tile) | gradient | {"dq_ptr": dq, "bias_ptr": bias}
        launches.append(of_tile(_logits_query_kernel, (count, h, b), arguments, tile))
        if bias is not None:
            dbias, total = summed(bias, call.position_bias)
            launches.append(total)
    if needs[1]:
        tile = _tile(call, "table", target)
        items, count = b * h // tables, -(-rows // tile.block_n)
        splits = min(items, -(-_WAVES * target.multiprocessors // (count * tables)))
        per_split = -(-items // splits)
        splits = -(-items // per_split)
        part = torch.empty((splits, tables, rows, e), dtype=torch.float32, device=device)
        sizes = {"items": items, "items_per_split": per_split, "heads_per_table": h // tables}
        arguments = _arguments(call, tile) | gradient | sizes | {"drel_ptr": part}
        launches.append(of_tile(_logits_table_kernel, (count, tables, splits), arguments, tile))
        drel, total = summed(part, call.rel_key)
        launches.append(total)
    return Plan(launches, gradients=lambda: [dq, drel, dbias])


def _tile(call: RelativeLogits, kernel: str, target: Target) -> configs.Tile:
    _, n, _, e = call.query.shape
    problem = configs.Problem(kernel, call.query.element_size(), power_of_two(e), n, call.key_len)
    return configs.choose(OP, problem, target)


def _arguments(call: RelativeLogits, tile: configs.Tile) -> dict:
    """Return the arguments of all kernels that follow from the call and the tile."""
    (_, n, h, e), start = call.query.shape, call.rel_start
    blocks = -(-(call.key_len + tile.block_m - 1) // tile.block_n)  # of displacements between block_m queries and keys
    shift = derived(call.query_offset, lambda offset: offset - start)
    query, bias = strided("q", call.query, "q", "bnh"), strided("position", call.position_bias, "p", "h")
    sizes = {"N": n, "S": call.key_len, "H": h, "shift": shift, "blocks": blocks, "E": e, "BLOCK_E": power_of_two(e)}
    return query | table(call.rel_key) | bias | sizes
