"""Host side of topk_chunks: allocates and launches. Nothing here waits for the device.

`tiles.json` has, for each kernel, architecture, element size and list width, the largest tiles that compile without
spills, for 128, 64 and 16 queries.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ....compile import tiles
from ....compile.target import Target
from ....core import layouts
from ....triton_lib.launch import Scalars, launch, power_of_two, strides
from ..call import TopkChunks
from ..splits import Split, aligned, split
from .backward import _topk_chunks_dkey_kernel, _topk_chunks_dquery_kernel
from .forward import _topk_chunks_merge_kernel, _topk_chunks_scan_kernel

OP = "topk_chunks"
TILES_PER_SPLIT = 4  # least number of tiles that a split scans: with fewer its own list costs more than it saves
_BUSY = 0.75  # share of multiprocessors that big tiles must occupy to be preferred to small ones
#: elements: Triton copies 16 bytes at once only if a row starts at a multiple of 16 elements, whatever their size
_ALIGNED = 16
_MERGE_TILE = 2304  # candidates and list slots that a program of the merge holds, in 128 registers a thread
_GATHER_ROWS, _GATHER_COLUMNS = 16, 256  # rows by columns that a step of a gradient gathers


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """block_q queries by block_s keys, block_d elements a step, lists of `slots`. resident: programs at once."""

    block_q: int
    block_s: int
    block_d: int
    num_warps: int
    num_stages: int
    precision: str
    resident: int  # programs that a multiprocessor holds
    slots: int


def kernel(call: TopkChunks) -> str:
    """Return the table's name of the kernel, by the feature of the call that limits its registers: squared differences,
    masks, or rows that can't be copied 16 bytes at once.
    """
    if _direct(call):
        return "scan_differences"
    if not (aligned(call.query, _ALIGNED) and aligned(call.key, _ALIGNED)):
        return "scan_unaligned"
    masked = call.causal_gap is not None or call.key_doc is not None or call.key_mask is not None
    return "scan_l2" if call.metric == "l2" else "scan_dot_masked" if masked else "scan_dot"


def choose_tile(call: TopkChunks, target: Target) -> ScanTile:
    """Return the tile with the most queries whose programs, with the keys split, still fill the device."""
    b, q, _ = call.query.shape
    choices = rows(call, target)
    for row in choices[:-1]:
        block_q, block_s = row["block_m"], row["block_n"]
        blocks, parts = b * -(-q // block_q), max(1, -(-call.key.shape[1] // block_s) // TILES_PER_SPLIT)
        if q > block_q // 2 and blocks * parts >= _BUSY * target.multiprocessors:
            return tile_of(tiles.served(OP, row))
    return tile_of(tiles.served(OP, choices[-1]))


def rows(call: TopkChunks, target: Target) -> list[dict]:
    """Return the table's rows that fit the call, one for each number of queries: the one with the narrowest list. The
    most queries come first.
    """
    ours = tiles.newest(tiles.table(OP), kernel(call), call.query.element_size(), target)
    fits = [row for row in ours if row["width"] >= call.k]
    narrowest = {row["block_m"]: row for row in sorted(fits, key=lambda row: row["width"], reverse=True)}
    return [narrowest[block_q] for block_q in sorted(narrowest, reverse=True)]


def tile_of(row: dict) -> ScanTile:
    names = ("block_m", "block_n", "block_d", "num_warps", "num_stages", "precision", "resident", "width")
    return ScanTile(*(row[name] for name in names))


def forward(
    call: TopkChunks, target: Target, tile: ScanTile | None = None, parts: Split | None = None
) -> tuple[Tensor, Tensor]:
    """Return scores and indices: by one launch, or by a scan of split keys and its merge."""
    b, q, _ = call.query.shape
    count, scan, merge = layouts.current().once("forward", lambda: _scalars(call, target, tile, parts))
    scores, indices = call.empty_outputs()
    partial = indices.new_empty((b, q, count, call.k)) if count > 1 else None
    given = _given(call) | {"scores_ptr": scores, "indices_ptr": indices, "partial_ptr": partial}
    launch(_topk_chunks_scan_kernel, given, scan)
    if partial is not None:
        launch(_topk_chunks_merge_kernel, given, merge)
    return scores, indices


def _scalars(
    call: TopkChunks, target: Target, tile: ScanTile | None, parts: Split | None
) -> tuple[int, Scalars, Scalars | None]:
    """Return the number of splits, and the scalars of the scan and of the merge."""
    b, q, _ = call.query.shape
    tile = choose_tile(call, target) if tile is None else tile
    blocks = b * -(-q // tile.block_q)
    if parts is None:
        places = target.multiprocessors * tile.resident
        parts = split(call.key.shape[1], tile.block_s, blocks, places, TILES_PER_SPLIT)
    scan = Scalars((blocks * parts.count,), _arguments(call, tile, parts), tile.num_warps, tile.num_stages)
    merge = _merge(b * q, parts.count * call.k, call.k, tile.slots) if parts.count > 1 else None
    return parts.count, scan, merge


def _given(call: TopkChunks) -> dict:
    """Return the tensors that the scan reads, and the number that moves with the position."""
    mask = None if call.key_mask is None else call.key_mask.view(torch.uint8)  # the same memory
    tensors = {"query_ptr": call.query, "key_ptr": call.key, "key_mask_ptr": mask}
    tensors |= {"query_doc_ptr": call.query_doc, "key_doc_ptr": call.key_doc}
    return tensors | call.place(call.query_offset)[0]


def _arguments(call: TopkChunks, tile: ScanTile, parts: Split) -> dict:
    """Return the scalars of the scan."""
    masks = {"HAS_CAUSAL": call.causal_gap, "HAS_DOC": call.query_doc, "HAS_MASK": call.key_mask}
    sizes = {"S": call.key.shape[1], "splits": parts.count, "split_len": parts.length}
    constants = {"DIRECT": _direct(call), "SPLIT": parts.count > 1, "PRECISION": tile.precision, "SLOTS": tile.slots}
    constants |= {"BLOCK_Q": tile.block_q, "BLOCK_S": tile.block_s, "BLOCK_D": tile.block_d}
    constants |= {"EVEN_D": call.key.shape[2] % tile.block_d == 0}
    constants |= {name: value is not None for name, value in masks.items()}
    docs = strides(call.query_doc, "qd", "bn", shared=True) | strides(call.key_doc, "kd", "bs", shared=True)
    return _pair(call) | docs | strides(call.key_mask, "m", "bs", shared=True) | sizes | constants


def _direct(call: TopkChunks) -> bool:
    """Whether distances are summed as squared differences: in float32, where norms and products would cancel.

    A difference of two halves is 0 or at least an ulp of 2**-11, far above the rounding error of float32 sums.
    """
    return call.metric == "l2" and call.query.dtype == torch.float32


def _merge(rows: int, count: int, k: int, slots: int) -> Scalars:
    """Return the scalars of the merge, which keeps the k best of `count` candidates in each of `rows` rows."""
    block_n = min(1024, power_of_two(count))
    fit = _MERGE_TILE // (block_n + slots)
    block_q = min(16, 1 << (fit.bit_length() - 1))  # a power of two, as every tile
    arguments = {"rows": rows, "count": count, "k": k, "SLOTS": slots, "BLOCK_Q": block_q, "BLOCK_N": block_n}
    return Scalars((-(-rows // block_q),), arguments, num_warps=4, num_stages=1)


def backward(call: TopkChunks, outputs, grads, needs, target: Target) -> list[Tensor | None]:
    """Return dquery and dkey; None for a gradient that is not needed."""
    indices, grad = outputs[1].contiguous(), grads[0].float().contiguous()
    return [of(call, indices, grad) if need else None for of, need in zip((dquery, dkey), needs, strict=True)]


def dquery(call: TopkChunks, indices: Tensor, grad: Tensor) -> Tensor:
    """Return dquery_i, the sum over slots of ds * key (l2: ds * 2 (key - query_i)) in the order of the slots."""
    b, q, d = call.query.shape
    grad_query = torch.empty((b, q, d), dtype=call.query.dtype, device=call.query.device)
    block_d = min(_GATHER_COLUMNS, power_of_two(d))
    tensors = {"query_ptr": call.query, "key_ptr": call.key, "grad_ptr": grad, "indices_ptr": indices}

    def scalars() -> Scalars:
        block_k = min(_GATHER_ROWS, power_of_two(call.k, least=1))
        sizes = {"S": call.key.shape[1], "BLOCK_K": block_k, "BLOCK_D": block_d}
        return Scalars((b * q, -(-d // block_d)), _pair(call) | sizes)

    known = layouts.current().once("dquery", scalars)
    launch(_topk_chunks_dquery_kernel, tensors | {"dquery_ptr": grad_query}, known)
    return grad_query


def dkey(call: TopkChunks, indices: Tensor, grad: Tensor) -> Tensor:
    """Return dkey_j, the sum over the slots that chose j of ds * query (l2: ds * 2 (query - key_j)).

    The slots are sorted stably by the key that they chose, so a key's slots are adjacent and in a fixed order. This
    takes O(B*Q*k) memory beside the gradient.
    """
    b, s, d = call.key.shape
    grad_key = torch.zeros((b, s, d), dtype=call.key.dtype, device=call.key.device)
    first_row = torch.arange(b, device=grad_key.device).view(-1, 1, 1) * s
    chosen = (indices >= 0) & (indices < s)  # the host does not read indices, so wrong ones are skipped
    target, slot = torch.sort(torch.where(chosen, indices + first_row, b * s).flatten(), stable=True)
    count, block_d = target.numel(), min(_GATHER_COLUMNS, power_of_two(d))
    tensors = {"query_ptr": call.query, "key_ptr": call.key, "grad_ptr": grad, "target_ptr": target, "slot_ptr": slot}

    def scalars() -> Scalars:
        sizes = {"count": count, "keys": b * s, "S": s, "BLOCK_N": _GATHER_ROWS, "BLOCK_D": block_d}
        return Scalars((count, -(-d // block_d)), _pair(call) | sizes)

    known = layouts.current().once("dkey", scalars)
    launch(_topk_chunks_dkey_kernel, tensors | {"dkey_ptr": grad_key}, known)
    return grad_key


def _pair(call: TopkChunks) -> dict:
    """Return the scalars of every kernel that reads queries and keys."""
    both = strides(call.query, "q", "bn", shared=True) | strides(call.key, "k", "bs", shared=True)
    return both | {"Q": call.query.shape[1], "D": call.key.shape[2], "k": call.k, "IS_L2": call.metric == "l2"}
