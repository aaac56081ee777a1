"""Host side of chunked cross-attention: which launches serve a call, as values. Nothing here runs or waits for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .. import configs
from .._problem import ChunkedCrossAttention
from .._target import Target
from . import _dropout
from ._cca_backward import _cca_backward_key_kernel, _cca_backward_query_kernel, _cca_backward_rel_kernel
from ._cca_forward import _cca_forward_kernel, _cca_merge_kernel
from ._launch import Launch, power_of_two, strides

OP = "chunked_cross_attention"
_MERGE_SPLITS = 8  # parts that one step of the merge loads
SLAB_BYTES = 48 << 20  # bound of the workspace for folded dS: it should stay in the second-level cache (50 MB on sm_90)
_WAVES = 2  # programs per multiprocessor below which the keys are split


@dataclasses.dataclass(frozen=True)
class Span:
    """The chunks that a call's rows attend, [first, first + count); first is -1 where rows before chunk 0 attend nothing."""

    first: int
    count: int


def span(call: ChunkedCrossAttention) -> Span:
    first = (call.query_start + 1) // call.chunk_len - 1
    return Span(first, (call.query_start + call.query.shape[1]) // call.chunk_len - first)


def tile(call: ChunkedCrossAttention, kernel: str, target: Target, rows: int | None = None) -> configs.Tile:
    width = power_of_two(max(call.query.shape[-1], 0 if call.rel_key is None else call.rel_key.shape[-1]))
    rows = min(call.chunk_len, call.query.shape[1]) if rows is None else rows
    problem = configs.Problem(kernel, call.query.element_size(), width, rows, call.key.shape[3])
    return configs.choose(OP, problem, target)


def inputs(call: ChunkedCrossAttention) -> dict:
    """Arguments that every kernel takes: tensors, their strides, and sizes."""
    b, n, h, _ = call.query.shape
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
        "q_ptr": call.query, "k_ptr": call.key, "v_ptr": call.value, "rel_ptr": rel, "rq_ptr": relative_query,
        "content_ptr": call.content_bias, "position_ptr": position_bias, "mask_ptr": mask, "gate_ptr": call.neighbour_gate,
        "seed_ptr": call.seed if call.dropout_p > 0 else None,
        **strides(call.query, "q", "bnh"), **strides(call.key, "k", "blkrg"), **strides(call.value, "v", "blkrg"), **rel_strides,
        **strides(relative_query, "rq", "bnh"), **strides(call.content_bias, "c", "h"), **strides(position_bias, "p", "h"),
        **strides(mask, "m", "blk" if mask is not None and mask.dim() == 3 else "blkr"), "stride_mr": 0 if mask is None or mask.dim() == 3 else mask.stride(3),
        **strides(call.neighbour_gate, "g", "blk"),
        "N": n, "M": call.chunk_len, "K": neighbours, "R": keys, "H": h, "T": rel_rows, "HEADS_PER_GROUP": h // groups,
        "rel_start": call.rel_start, "query_start": call.query_start,
        "scale": call.scale, "dropout_limit": _dropout.threshold(call.dropout_p), "dropout_scale": 1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0,
    }  # fmt: skip


def constants(call: ChunkedCrossAttention, tile: configs.Tile) -> dict:
    d = call.query.shape[-1]
    e = d if call.rel_key is None else call.rel_key.shape[-1]
    return {
        "D": d, "E": e, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": power_of_two(d), "BLOCK_E": power_of_two(e),
        "MASK_TOKENS": call.neighbour_mask is not None and call.neighbour_mask.dim() == 4,
        "EVEN_KEYS": call.key.shape[3] % tile.block_n == 0, "PRECISION": tile.precision,
    }  # fmt: skip


def splits(call: ChunkedCrossAttention, tile: configs.Tile, programs: int, target: Target) -> tuple[int, int, int, int]:
    """(keys per split, neighbours per split, splits over neighbours, splits): one split unless the machine would stand idle.

    Keys are split before neighbours, because the neighbours of a key block share its position logits.
    """
    neighbours, keys = call.key.shape[2:4]
    want = -(-_WAVES * target.multiprocessors // programs) if programs < target.multiprocessors else 1
    blocks = -(-keys // tile.block_n)
    per_split = -(-blocks // min(blocks, want)) * tile.block_n
    key_splits = -(-keys // per_split)
    neighbours_per_split = -(-neighbours // min(neighbours, -(-want // key_splits)))
    neighbour_splits = -(-neighbours // neighbours_per_split)
    return per_split, neighbours_per_split, neighbour_splits, key_splits * neighbour_splits


def forward(call: ChunkedCrossAttention, target: Target, chosen: configs.Tile | None = None) -> tuple[Tensor, Tensor, list[Launch]]:
    """out, lse (not filled yet) and the launches that fill them."""
    b, n, h, d = call.query.shape
    chosen = tile(call, "forward", target) if chosen is None else chosen
    part = span(call)
    blocks = -(-min(call.chunk_len, n) // chosen.block_m)
    per_split, neighbours_per_split, neighbour_splits, count = splits(call, chosen, part.count * blocks * h * b, target)
    out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    lse = torch.empty((b, h, n), dtype=torch.float32, device=out.device)
    into = {"out_ptr": out, "lse_ptr": lse}
    merge = []
    if count > 1:
        into = {"out_ptr": torch.empty((count, b, n, h, d), dtype=torch.float32, device=out.device),
                "lse_ptr": torch.empty((count, b, h, n), dtype=torch.float32, device=out.device)}  # fmt: skip
        arguments = {"part_ptr": into["out_ptr"], "part_lse_ptr": into["lse_ptr"], "out_ptr": out, "lse_ptr": lse, "N": n, "H": h,
                     "splits": count, "D": d, "BLOCK_D": power_of_two(d), "BLOCK_S": _MERGE_SPLITS}  # fmt: skip
        merge = [Launch(_cca_merge_kernel, (n * h, b), arguments, num_warps=1, num_stages=1)]
    arguments = {
        **inputs(call), **into, "first_chunk": part.first, "blocks": blocks,
        "keys_per_split": per_split, "neighbours_per_split": neighbours_per_split, "neighbour_splits": neighbour_splits,
        **constants(call, chosen),
    }  # fmt: skip
    grid = (part.count * blocks * h, b, count)
    return out, lse, [Launch(_cca_forward_kernel, grid, arguments, chosen.num_warps, chosen.num_stages), *merge]


@dataclasses.dataclass(frozen=True)
class Backward:
    """launches fill the buffers; `gradients()` then sums the partials, by torch's own reductions (fixed order, no atomics)."""

    launches: list[Launch]
    gradients: Callable[[], list[Tensor | None]]


def backward(
    call: ChunkedCrossAttention, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...], target: Target
) -> Backward:
    """Launches and the final sums of the gradients `needs`, in the order of DIFFERENTIABLE."""
    need = dict(zip(call.DIFFERENTIABLE, needs, strict=True))
    need_keys = need["key"] or need["value"]
    (out, lse), (grad_out, grad_lse) = outputs, grads
    b, n, h, d = call.query.shape
    chunks, neighbours, keys, groups = call.key.shape[1:5]
    part = span(call)
    # the chunk's rows, however few of them this call brings: tiles start at index 0 of the chunk
    whole = tile(call, "backward", target, rows=call.chunk_len)
    blocks = -(-call.chunk_len // whole.block_m)
    fused = need_keys and groups == h and blocks == 1
    chosen = whole if fused else tile(call, "backward_query", target, rows=call.chunk_len)
    blocks, key_blocks = -(-call.chunk_len // chosen.block_m), -(-keys // chosen.block_n)
    items = b * part.count * blocks

    def new(*shape: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=call.query.device)

    same = call.query.dtype
    grad_out = new(b, n, h, d, dtype=same, zero=True) if grad_out is None else grad_out
    has_rel = call.rel_key is not None
    e = call.rel_key.shape[-1] if has_rel else d
    own_query = has_rel and call.rel_query is not None
    dq = new(b, n, h, d, dtype=same)
    drq = new(b, n, h, e, dtype=same) if own_query else None
    dk, dv = (new(*call.key.shape, dtype=same), new(*call.key.shape, dtype=same)) if need_keys else (None, None)
    for grad in (dk, dv) if need_keys else ():
        grad[:, : max(part.first, 0)].zero_()  # chunks that nothing attends
        grad[:, part.first + part.count :].zero_()
    dgate = new(b, chunks, neighbours, blocks * h * key_blocks, zero=True) if need["neighbour_gate"] else None
    dcontent = new(items, h, d) if need["content_bias"] else None
    dposition = new(items, h, e) if has_rel and need["position_bias"] else None
    delta = new(b, h, n) if need_keys and not fused else None

    need_rel = has_rel and need["rel_key"]
    tile_bytes = h * key_blocks * chosen.block_m * chosen.block_n * call.query.element_size()
    slab = min(items, max(1, SLAB_BYTES // tile_bytes)) if need_rel else items
    slab = -(-items // -(-items // slab))  # slabs of equal size
    ds = new(slab, h, key_blocks, chosen.block_m, chosen.block_n, dtype=same) if need_rel else None

    shared = {**inputs(call), "first_chunk": part.first, "blocks": blocks, "key_blocks": key_blocks, "L": chunks}
    gradient_in = {"do_ptr": grad_out, **strides(grad_out, "do", "bnh"), "lse_ptr": lse, "delta_ptr": delta}
    query_arguments = {
        **shared, **gradient_in, "chunks": part.count, "out_ptr": out, "dlse_ptr": grad_lse, **strides(grad_lse, "dl", "bhn"),
        "dq_ptr": dq, "drq_ptr": drq, "dk_ptr": dk if fused else None, "dv_ptr": dv if fused else None, "dgate_ptr": dgate,
        "dcontent_ptr": dcontent, "dposition_ptr": dposition, "ds_ptr": ds, **constants(call, chosen), "WRITE_KEYS": fused,
    }  # fmt: skip
    launches, rel = [], None
    if need_rel:
        rel = _RelativeKeys(call, chosen, part, blocks, key_blocks, items, slab, ds, target)
    for first in range(0, items, slab):
        count = min(slab, items - first)
        launches.append(Launch(_cca_backward_query_kernel, (count * h,), {**query_arguments, "first_item": first}, chosen.num_warps, chosen.num_stages))
        if rel is not None:
            launches.append(rel.launch(first, first + count))
    if need_keys and not fused:
        launches.append(_key_launch(call, part, shared, gradient_in, dk, dv, target))

    def gradients() -> list[Tensor | None]:
        found = {
            "query": dq, "key": dk, "value": dv, "rel_key": rel.total() if rel is not None else None, "rel_query": drq,
            "content_bias": dcontent.sum(0).to(same) if dcontent is not None else None,
            "position_bias": dposition.sum(0).to(same) if dposition is not None else None,
            "neighbour_gate": dgate.sum(-1).to(same) if dgate is not None else None,
        }  # fmt: skip
        # an input that the call makes no use of (a relative query without relative keys) has a zero gradient
        return [(torch.zeros_like(getattr(call, name)) if found[name] is None else found[name]) if need[name] else None for name in need]

    return Backward(launches, gradients)


def _key_launch(call, part: Span, shared: dict, gradient_in: dict, dk: Tensor, dv: Tensor, target: Target) -> Launch:
    b, _, h, _ = call.query.shape
    neighbours, keys, groups = call.key.shape[2:5]
    chosen = tile(call, "backward_key", target, rows=call.chunk_len)
    key_blocks, first = -(-keys // chosen.block_n), max(part.first, 0)
    arguments = {
        **shared, **gradient_in, "dk_ptr": dk, "dv_ptr": dv, **constants(call, chosen), "first_chunk": first,
        "blocks": -(-call.chunk_len // chosen.block_m), "key_blocks": key_blocks,
    }  # fmt: skip
    grid = (max(part.first + part.count - first, 0) * neighbours * key_blocks * groups, b)
    return Launch(_cca_backward_key_kernel, grid, arguments, chosen.num_warps, chosen.num_stages)


class _RelativeKeys:
    """The second stage of dR: launches that multiply the folded dS of a slab with the queries, and the final sum."""

    def __init__(self, call, query_tile: configs.Tile, part: Span, blocks: int, key_blocks: int, items: int, slab: int, ds: Tensor, target: Target):
        _, _, h, _ = call.query.shape
        block_m, block_n = query_tile.block_m, query_tile.block_n
        self.call, self.block_n, self.key_blocks = call, block_n, key_blocks
        bands = (block_m + block_n - 2) // block_n + 1
        diagonals = (blocks - 1) * (block_m // block_n) + bands + key_blocks - 1
        chosen = tile(call, "backward_rel", target)
        want = -(-_WAVES * target.multiprocessors // (diagonals * h))
        self.items_per_split = -(-slab // min(slab, want))
        splits = -(-slab // self.items_per_split)
        e = call.rel_key.shape[-1]
        self.part = torch.empty((splits, h, diagonals * block_n, e), dtype=torch.float32, device=call.query.device)
        self.grid = (diagonals, h, splits)
        self.tile = chosen
        given = inputs(call)
        names = ("q_ptr", "rq_ptr", "position_ptr", "stride_qb", "stride_qn", "stride_qh", "stride_rqb", "stride_rqn", "stride_rqh", "stride_ph",
                 "N", "M", "H", "query_start", "scale")  # fmt: skip
        self.arguments = {
            **{name: given[name] for name in names}, "ds_ptr": ds, "part_ptr": self.part, "first_chunk": part.first, "chunks": part.count,
            "blocks": blocks, "items_per_split": self.items_per_split, "key_blocks": key_blocks,
            "E": e, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_E": power_of_two(e), "PRECISION": chosen.precision,
        }  # fmt: skip

    def launch(self, first: int, last: int) -> Launch:
        arguments = {**self.arguments, "first_item": first, "last_item": last}
        return Launch(_cca_backward_rel_kernel, self.grid, arguments, self.tile.num_warps, self.tile.num_stages)

    def total(self) -> Tensor:
        """[H or 1,T,E]: partials summed over splits (and heads, where they share a table) and moved to the table's rows."""
        rel = self.call.rel_key
        total = self.part.sum((0, 1)).unsqueeze(0) if rel.shape[0] == 1 else self.part.sum(0)
        # row x of the sum is displacement x + 1 - key_blocks * block_n, row t of the table is displacement rel_start + t
        shift = 1 - self.key_blocks * self.block_n - self.call.rel_start
        first, last = max(shift, 0), min(shift + total.shape[1], rel.shape[1])
        if first == 0 and last == rel.shape[1]:
            return total[:, -shift : last - shift].to(rel.dtype)
        grad = torch.zeros(rel.shape, dtype=rel.dtype, device=rel.device)
        if first < last:
            grad[:, first:last] = total[:, first - shift : last - shift]
        return grad
