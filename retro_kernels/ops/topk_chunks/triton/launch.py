"""Host side of topk_chunks: which launches serve a call, as values. Nothing here runs or waits for the device.

The tiles are data, retro_kernels/ops/topk_chunks/tiles.json: for each kernel, architecture, element size and list width
the largest tiles that compile without spills, for 128, 64 and 16 queries.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ....compile import configs
from ....compile.target import Target
from ....core.steps import derived
from ....triton_lib.launch import Launch, power_of_two
from ....triton_lib.plan import Plan
from ..call import TopkChunks
from .backward import _topk_chunks_dkey_kernel, _topk_chunks_dquery_kernel
from .forward import _topk_chunks_merge_kernel, _topk_chunks_scan_kernel

OP = "topk_chunks"
#: a split scans at least so many tiles, or its own list costs more than it saves
_TILES_PER_SPLIT = 4
#: multiprocessors that big tiles must keep busy to be preferred to small ones
_BUSY = 0.75
#: splits are searched up to so many rounds of the device
_ROUNDS = 4
#: elements: Triton copies 16 bytes at once only where it sees that a
#: row starts at a multiple of 16 elements, whatever their size
_ALIGNED = 16
#: candidates and list slots that one program of the merge holds: 128 registers a thread
_MERGE_TILE = 2304
#: gathered rows by columns that one step of a gradient loads
_GATHER_ROWS, _GATHER_COLUMNS = 16, 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_q queries by block_s keys, block_d elements a step, lists
    of `slots`. `resident`: programs a multiprocessor holds.
    """

    block_q: int
    block_s: int
    block_d: int
    num_warps: int
    num_stages: int
    precision: str
    resident: int
    slots: int


@dataclasses.dataclass(frozen=True)
class Split:
    """The keys in `count` parts of `length` each, a multiple of the tile."""

    count: int
    length: int


def kernel(call: TopkChunks) -> str:
    """The table's name for what limits the registers: squares in the loop, masks, or rows that can't be
    copied 16 bytes at once."""
    if _direct(call):
        return "scan_differences"
    if not (_aligned(call.query) and _aligned(call.key)):
        return "scan_unaligned"
    masked = call.causal_gap is not None or call.key_doc is not None or call.key_mask is not None
    return "scan_l2" if call.metric == "l2" else "scan_dot_masked" if masked else "scan_dot"


def choose_tile(call: TopkChunks, target: Target) -> Tile:
    """The most queries a tile that still fill the device, with the keys split where queries alone don't."""
    b, q, _ = call.query.shape
    choices = rows(call, target)
    for row in choices[:-1]:
        block_q, block_s = row["block_m"], row["block_n"]
        blocks, parts = b * _cdiv(q, block_q), max(1, _cdiv(call.key.shape[1], block_s) // _TILES_PER_SPLIT)
        if q > block_q // 2 and blocks * parts >= _BUSY * target.multiprocessors:
            return tile_of(configs.served(OP, row))
    return tile_of(configs.served(OP, choices[-1]))


def rows(call: TopkChunks, target: Target) -> list[dict]:
    """The table's rows that may serve the call, the most queries
    first; of each number of queries the narrowest list that fits.
    """
    ours = [
        row for row in configs.table(OP) if row["kernel"] == kernel(call) and row["bytes"] == call.query.element_size()
    ]
    known = {row["arch"] for row in ours}
    arch = max((a for a in known if a <= target.arch), default=min(known))
    fits = sorted((row for row in ours if row["arch"] == arch and row["width"] >= call.k), key=lambda row: row["width"])
    narrowest: dict[int, dict] = {}
    for row in fits:
        narrowest.setdefault(row["block_m"], row)
    return [narrowest[block_q] for block_q in sorted(narrowest, reverse=True)]


def tile_of(row: dict) -> Tile:
    names = ("block_m", "block_n", "block_d", "num_warps", "num_stages", "precision", "resident", "width")
    return Tile(*(row[name] for name in names))


def split(keys: int, block_s: int, blocks: int, places: int) -> Split:
    """The fewest parts that leave the fewest of `places` idle in the last round.

    >>> split(keys=10**6, block_s=128, blocks=1, places=264)
    Split(count=261, length=3840)
    """
    count = _cdiv(keys, block_s)

    def busy(parts: int) -> float:
        return round(blocks * parts / (_cdiv(blocks * parts, places) * places), 2)

    most = max(1, min(count // _TILES_PER_SPLIT, _ROUNDS * places // blocks))
    length = _cdiv(count, max(range(1, most + 1), key=lambda parts: (busy(parts), -parts))) * block_s
    return Split(_cdiv(keys, length), length)


def forward(call: TopkChunks, target: Target, tile: Tile | None = None, parts: Split | None = None) -> Plan:
    """scores and indices, and the launches that fill them: one, or a scan of split keys and its merge."""
    b, q, _ = call.query.shape
    s = call.key.shape[1]
    tile = choose_tile(call, target) if tile is None else tile
    blocks = b * _cdiv(q, tile.block_q)
    parts = split(s, tile.block_s, blocks, target.multiprocessors * tile.resident) if parts is None else parts
    device = call.query.device
    scores = torch.empty((b, q, call.k), dtype=torch.float32, device=device)
    indices = torch.empty((b, q, call.k), dtype=torch.int64, device=device)
    partial = torch.empty((b, q, parts.count, call.k), dtype=torch.int64, device=device) if parts.count > 1 else None
    out = {"scores_ptr": scores, "indices_ptr": indices, "partial_ptr": partial}
    arguments = {
        **_inputs(call),
        **out,
        "splits": parts.count,
        "split_len": parts.length,
        **_constants(call, tile, parts),
    }
    launches = [Launch(_topk_chunks_scan_kernel, (blocks * parts.count,), arguments, tile.num_warps, tile.num_stages)]
    if partial is not None:
        launches.append(_merge(out, b * q, parts.count * call.k, call.k, tile.slots))
    return Plan(launches, (scores, indices))


def _inputs(call: TopkChunks) -> dict:
    """Arguments of the scan that follow from the call alone."""
    q, s, d = call.query.shape[1], call.key.shape[1], call.key.shape[2]
    gap = call.causal_gap
    # beyond these nothing changes, and its sum with a row fits int32
    shift = derived(call.query_offset, lambda offset: min(max(0 if gap is None else offset - gap, -q - 1), s))
    mask = None if call.key_mask is None else call.key_mask.view(torch.uint8)  # the same memory
    return {
        "query_ptr": call.query,
        "key_ptr": call.key,
        "query_doc_ptr": call.query_doc,
        "key_doc_ptr": call.key_doc,
        "key_mask_ptr": mask,
        **_strides(call.query, "q", "bn"),
        **_strides(call.key, "k", "bs"),
        **_strides(call.query_doc, "qd", "bn"),
        **_strides(call.key_doc, "kd", "bs"),
        **_strides(mask, "m", "bs"),
        "Q": q,
        "S": s,
        "D": d,
        "k": call.k,
        "causal_shift": shift,
    }


def _constants(call: TopkChunks, tile: Tile, parts: Split) -> dict:
    return {
        "IS_L2": call.metric == "l2",
        "DIRECT": _direct(call),
        "HAS_CAUSAL": call.causal_gap is not None,
        "HAS_DOC": call.query_doc is not None,
        "HAS_MASK": call.key_mask is not None,
        "SPLIT": parts.count > 1,
        "EVEN_D": call.key.shape[2] % tile.block_d == 0,
        "PRECISION": tile.precision,
        "SLOTS": tile.slots,
        "BLOCK_Q": tile.block_q,
        "BLOCK_S": tile.block_s,
        "BLOCK_D": tile.block_d,
    }


def _direct(call: TopkChunks) -> bool:
    """float32 distances are summed as differences: its callers count on digits that norms and products cancel away.

    Between halves a difference is either 0 or at least an ulp of 2**-11, far above what float32 sums lose.
    """
    return call.metric == "l2" and call.query.dtype == torch.float32


def _merge(out: dict, rows: int, count: int, k: int, slots: int) -> Launch:
    """Return the launch that keeps the k best of `count` candidates in each of `rows` rows."""
    block_n = min(1024, power_of_two(count))
    fit = _MERGE_TILE // (block_n + slots)
    block_q = min(16, 1 << (fit.bit_length() - 1))  # a power of two, as every tile
    arguments = {**out, "rows": rows, "count": count, "k": k, "SLOTS": slots, "BLOCK_Q": block_q, "BLOCK_N": block_n}
    return Launch(_topk_chunks_merge_kernel, (_cdiv(rows, block_q),), arguments, num_warps=4, num_stages=1)


def backward(call: TopkChunks, outputs, grads, needs, target: Target) -> Plan:
    """dquery and dkey, each from launches of its own."""
    indices, grad = outputs[1].contiguous(), grads[0].float().contiguous()
    made = [plan(call, indices, grad) if need else (None, []) for plan, need in zip((dquery, dkey), needs, strict=True)]
    return Plan(
        [launch for _, launches in made for launch in launches], gradients=lambda: [gradient for gradient, _ in made]
    )


def dquery(call: TopkChunks, indices: Tensor, grad: Tensor) -> tuple[Tensor, list[Launch]]:
    """dquery_i = sum over slots of ds * key (l2: ds * 2 (key - query_i)), in the order of the slots."""
    b, q, d = call.query.shape
    grad_query = torch.empty((b, q, d), dtype=call.query.dtype, device=call.query.device)
    arguments = {
        "grad_ptr": grad,
        "indices_ptr": indices,
        "query_ptr": call.query,
        "key_ptr": call.key,
        "dquery_ptr": grad_query,
        **_strides(call.query, "q", "bn"),
        **_strides(call.key, "k", "bs"),
        "Q": q,
        "D": d,
        "k": call.k,
        "IS_L2": call.metric == "l2",
        "BLOCK_K": min(_GATHER_ROWS, power_of_two(call.k, least=1)),
        "BLOCK_D": min(_GATHER_COLUMNS, power_of_two(d)),
    }
    return grad_query, [Launch(_topk_chunks_dquery_kernel, (b * q, _cdiv(d, arguments["BLOCK_D"])), arguments)]


def dkey(call: TopkChunks, indices: Tensor, grad: Tensor) -> tuple[Tensor, list[Launch]]:
    """dkey_j = sum over the slots that chose j of ds * query (l2: ds * 2 (query - key_j)), in the order of the slots.

    The slots are sorted by the key they chose, stably, so a key's slots are one run in a fixed order. O(B*Q*k) beside
    the gradient.
    """
    b, s, d = call.key.shape
    grad_key = torch.zeros((b, s, d), dtype=call.key.dtype, device=call.key.device)
    first_row = torch.arange(b, device=grad_key.device).view(-1, 1, 1) * s
    target, slot = torch.sort(torch.where(indices < 0, b * s, indices + first_row).flatten(), stable=True)
    arguments = {
        "grad_ptr": grad,
        "target_ptr": target,
        "slot_ptr": slot,
        "query_ptr": call.query,
        "key_ptr": call.key,
        "dkey_ptr": grad_key,
        **_strides(call.query, "q", "bn"),
        **_strides(call.key, "k", "bs"),
        "count": target.numel(),
        "keys": b * s,
        "Q": call.query.shape[1],
        "S": s,
        "D": d,
        "k": call.k,
        "IS_L2": call.metric == "l2",
        "BLOCK_N": _GATHER_ROWS,
        "BLOCK_D": min(_GATHER_COLUMNS, power_of_two(d)),
    }
    return grad_key, [Launch(_topk_chunks_dkey_kernel, (target.numel(), _cdiv(d, arguments["BLOCK_D"])), arguments)]


def _strides(tensor: Tensor | None, prefix: str, letters: str) -> dict[str, int]:
    """Strides over batch and rows; one set for all batch entries is a batch stride of 0."""
    pair = (0, 0) if tensor is None else tensor.stride()[:2]
    pair = (0, pair[1]) if tensor is not None and tensor.shape[0] == 1 else pair
    return {f"stride_{prefix}{letter}": s for letter, s in zip(letters, pair, strict=True)}


def _aligned(tensor: Tensor) -> bool:
    return (
        tensor.shape[-1] % _ALIGNED == 0
        and all(s % _ALIGNED == 0 for s in tensor.stride()[:-1])
        and tensor.data_ptr() % 16 == 0
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
