"""Host side of chunked cross-attention: which launches serve a call,
as values. Nothing here runs or waits for the device.
"""

from __future__ import annotations

import dataclasses

import torch

from ... import configs
from ..._problem import ChunkedCrossAttention
from ..._target import Target
from ..common import dropout
from ..common.launch import Launch, power_of_two, strides
from ..common.merge import _merge_kernel
from ..common.plan import Plan
from .forward import _cca_forward_kernel

OP = "chunked_cross_attention"
_MERGE_SPLITS = 8  # parts that one step of the merge loads
WAVES = 2  # programs per multiprocessor below which the keys are split


@dataclasses.dataclass(frozen=True)
class Span:
    """The chunks that a call's rows attend, [first, first + count); first is -1 where rows before chunk 0 attend
    nothing.

    Where batch entries have starts of their own each has its own first chunk, and `count` is the most that a row's
    entry can attend.
    """

    first: int
    count: int


def span(call: ChunkedCrossAttention) -> Span:
    if call.batch_start is not None:
        return Span(0, (call.query.shape[1] - 2) // call.chunk_len + 2)
    first = (call.query_start + 1) // call.chunk_len - 1
    return Span(first, (call.query_start + call.query.shape[1]) // call.chunk_len - first)


def choose_tile(call: ChunkedCrossAttention, kernel: str, target: Target, rows: int | None = None) -> configs.Tile:
    """The committed tile of a kernel."""
    width = max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1])
    rows = min(call.chunk_len, call.query.shape[1]) if rows is None else rows
    problem = configs.Problem(kernel, call.query.element_size(), width, rows, call.key.shape[3], options(call))
    return configs.choose(OP, problem, target)


def options(call: ChunkedCrossAttention) -> tuple[str, ...]:
    """What of a call costs a tile registers, for `configs.choose`."""
    mask, gate = call.neighbour_mask is not None, call.neighbour_gate is not None
    flags = {
        "dropout": call.dropout_p > 0,
        "masked": call.dropout_p > 0 or mask or gate,
        "gated_mask": mask and gate,
        "plain": call.rel_key is None,
        "narrow": call.rel_key is not None and call.rel_key.shape[-1] < call.query.shape[-1],
    }
    return tuple(name for name, present in flags.items() if present)


def inputs(call: ChunkedCrossAttention) -> dict:
    """Arguments that every kernel takes: tensors, their strides, and sizes."""
    n, h = call.query.shape[1:3]
    neighbours, keys, groups = call.key.shape[2:5]
    rel = call.rel_key
    mask = None if call.neighbour_mask is None else call.neighbour_mask.view(torch.uint8)  # the same memory
    rel_rows = 0 if rel is None else rel.shape[1]
    rel_strides = strides(rel, "r", "ht")
    if rel is not None and rel.shape[0] == 1:
        rel_strides["stride_rh"] = 0  # one table for all heads
    has_rel = rel is not None
    relative_query = call.rel_query if has_rel else None
    position_bias = call.position_bias if has_rel else None
    return {
        "q_ptr": call.query,
        "k_ptr": call.key,
        "v_ptr": call.value,
        "rel_ptr": rel,
        "rq_ptr": relative_query,
        "content_ptr": call.content_bias,
        "position_ptr": position_bias,
        "mask_ptr": mask,
        "gate_ptr": call.neighbour_gate,
        "seed_ptr": call.seed if call.dropout_p > 0 else None,
        "batch_start_ptr": call.batch_start,
        "stride_batch_start": 0 if call.batch_start is None else call.batch_start.stride(0),
        **strides(call.query, "q", "bnh"),
        **strides(call.key, "k", "blkrg"),
        **strides(call.value, "v", "blkrg"),
        **rel_strides,
        **strides(relative_query, "rq", "bnh"),
        **strides(call.content_bias, "c", "h"),
        **strides(position_bias, "p", "h"),
        **strides(mask, "m", "blk" if mask is not None and mask.dim() == 3 else "blkr"),
        "stride_mr": 0 if mask is None or mask.dim() == 3 else mask.stride(3),
        **strides(call.neighbour_gate, "g", "blk"),
        "N": n,
        "M": call.chunk_len,
        "K": neighbours,
        "R": keys,
        "H": h,
        "L": call.key.shape[1],
        "T": rel_rows,
        "HEADS_PER_GROUP": h // groups,
        "rel_start": call.rel_start,
        "query_start": call.query_start,
        "scale": call.scale,
        "dropout_limit": dropout.threshold(call.dropout_p),
        "dropout_scale": 1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0,
    }


def constants(call: ChunkedCrossAttention, tile: configs.Tile) -> dict:
    d = call.query.shape[-1]
    e = d if call.rel_key is None else call.rel_key.shape[-1]
    return {
        "D": d,
        "E": e,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": power_of_two(d),
        "BLOCK_E": power_of_two(e),
        "MASK_TOKENS": call.neighbour_mask is not None and call.neighbour_mask.dim() == 4,
        "EVEN_KEYS": call.key.shape[3] % tile.block_n == 0,
        "PRECISION": tile.precision,
    }


def splits(call: ChunkedCrossAttention, tile: configs.Tile, programs: int, target: Target) -> tuple[int, int, int, int]:
    """(keys per split, neighbours per split, splits over neighbours, splits): one split unless the machine would stand
    idle.

    Keys are split before neighbours, because the neighbours of a key block share its position logits.
    """
    neighbours, keys = call.key.shape[2:4]
    want = -(-WAVES * target.multiprocessors // programs) if programs < target.multiprocessors else 1
    blocks = -(-keys // tile.block_n)
    per_split = -(-blocks // min(blocks, want)) * tile.block_n
    key_splits = -(-keys // per_split)
    neighbours_per_split = -(-neighbours // min(neighbours, -(-want // key_splits)))
    neighbour_splits = -(-neighbours // neighbours_per_split)
    return per_split, neighbours_per_split, neighbour_splits, key_splits * neighbour_splits


def forward(call: ChunkedCrossAttention, target: Target, tile: configs.Tile | None = None) -> Plan:
    """out and lse, and the launches that fill them."""
    b, n, h, d = call.query.shape
    tile = choose_tile(call, "forward", target) if tile is None else tile
    part = span(call)
    blocks = -(-min(call.chunk_len, n) // tile.block_m)
    per_split, neighbours_per_split, neighbour_splits, count = splits(call, tile, part.count * blocks * h * b, target)
    out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    lse = torch.empty((b, h, n), dtype=torch.float32, device=out.device)
    into = {"out_ptr": out, "lse_ptr": lse}
    merge = []
    if count > 1:
        into = {
            "out_ptr": torch.empty((count, b, n, h, d), dtype=torch.float32, device=out.device),
            "lse_ptr": torch.empty((count, b, h, n), dtype=torch.float32, device=out.device),
        }
        arguments = {
            "part_ptr": into["out_ptr"],
            "part_lse_ptr": into["lse_ptr"],
            "out_ptr": out,
            "lse_ptr": lse,
            "N": n,
            "H": h,
            "splits": count,
            "D": d,
            "BLOCK_D": power_of_two(d),
            "BLOCK_S": _MERGE_SPLITS,
        }
        merge = [Launch(_merge_kernel, (n * h, b), arguments, num_warps=1, num_stages=1)]
    arguments = {
        **inputs(call),
        **into,
        "first_chunk": part.first,
        "blocks": blocks,
        "keys_per_split": per_split,
        "neighbours_per_split": neighbours_per_split,
        "neighbour_splits": neighbour_splits,
        **constants(call, tile),
    }
    grid = (part.count * blocks * h, b, count)
    main = Launch(_cca_forward_kernel, grid, arguments, tile.num_warps, tile.num_stages, tile.max_registers)
    return Plan([main, *merge], (out, lse))
