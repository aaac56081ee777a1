"""Exact top-k of thousands of queries: tensor-core tiles, per-row thresholds, lists merged at the end
(csrc/cuda/topk_chunks.cu).

wgmma on sm_90, mma.sync elsewhere.
Chosen for calls that are bound by arithmetic: fewer queries are bound by reading the keys, and Triton serves them as
fast (`slower`).
The gradient is a gather and a segment sum: Triton's.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ...compile.target import OLDEST_ARCH, Target, current_target
from ...core import steps
from .call import TopkChunks

MAX_K = 128
#: queries below which reading the keys takes longer than multiplying them
#: (H100: 990 TFLOP/s over 3.35 TB/s is 295 FLOP a byte, and q queries make q FLOP a byte of 16-bit keys)
LEAST_QUERIES = 512
#: key numbers, and their ends rounded up to a tile, fit int32
MAX_KEYS = 2**30
TILE_Q, TILE_S = 128, 256  # TOPK_TILE_Q and TOPK_TILE_S in csrc/cuda/topk_chunks.h
#: bytes of a block of the scan: TOPK_CHUNKS_SCAN_WGMMA on sm_90, TOPK_CHUNKS_SCAN elsewhere (csrc/cuda/topk_chunks.h)
SHARED_BYTES_WGMMA, SHARED_BYTES = 208416, 159264
#: a split scans at least so many tiles
_TILES_PER_SPLIT = 8


def unsupported(call: TopkChunks) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    query, key = call.query, call.key
    for name, tensor in (("query", query), ("key", key)):
        if tensor.device.type != "cuda":
            return f"{name} is on {tensor.device}, not on a cuda device"
    return unsupported_on(call, current_target(query.device))


def unsupported_on(call: TopkChunks, target: Target) -> str | None:
    """The part of `unsupported` that follows from types, sizes, and the target."""
    query, key = call.query, call.key
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            return f"{name} is {tensor.dtype}; have bfloat16, float16"
    if target.arch < OLDEST_ARCH:
        return f"sm_{target.arch} has no asynchronous copies; needs sm_{OLDEST_ARCH}"
    shared = SHARED_BYTES_WGMMA if target.arch // 10 == 9 else SHARED_BYTES
    if shared > target.shared_memory:
        return f"a block needs {shared} bytes of shared memory; sm_{target.arch} has {target.shared_memory}"
    if call.k > MAX_K:
        return f"k={call.k} exceeds {MAX_K}"
    if key.shape[1] > MAX_KEYS or query.shape[1] > MAX_KEYS:
        return f"Q={query.shape[1]}, S={key.shape[1]}: one exceeds {MAX_KEYS}"
    if not (_aligned(query) and _aligned(key)):
        return "rows must start at multiples of 16 bytes, and D be a multiple of 8"
    for name, docs in (("query_doc", call.query_doc), ("key_doc", call.key_doc)):
        if docs is not None and docs.dtype not in (torch.int64, torch.int32):
            return f"{name} is {docs.dtype}; have int64, int32"
    return None


def slower(call: TopkChunks) -> str | None:
    """Why triton serves the call faster; None if this backend is to be chosen."""
    return (
        slower_on(call, current_target(call.query.device)) if importlib.util.find_spec("triton") is not None else None
    )


def slower_on(call: TopkChunks, target: Target) -> str | None:
    """The part of `slower` that follows from sizes and the target."""
    if call.query.shape[1] < LEAST_QUERIES:
        limit = f"below {LEAST_QUERIES} queries the keys' bandwidth is the limit, and triton reaches it"
        return f"Q={call.query.shape[1]}: {limit}"
    if target.arch >= 100:
        return f"on sm_{target.arch} triton uses tcgen05, this kernel mma.sync"
    return None


def forward(call: TopkChunks) -> tuple[Tensor, Tensor]:
    """scores [B,Q,k] float32, indices [B,Q,k] int64."""
    query = call.query
    b, q, _ = query.shape
    target = current_target(steps.device_of(query))
    count, length = split(b, q, call.key.shape[1], target.multiprocessors)
    scores = torch.empty((b, q, call.k), dtype=torch.float32, device=query.device)
    indices = torch.empty((b, q, call.k), dtype=torch.int64, device=query.device)
    partial = torch.empty((b, q, count, call.k), dtype=torch.int64, device=query.device)
    gap, s = call.causal_gap, call.key.shape[1]
    # beyond these nothing changes, and its sum with a row fits int32
    shift = steps.derived(call.query_offset, lambda offset: min(max(0 if gap is None else offset - gap, -q - 1), s))
    tensors = (query, call.key, call.query_doc, call.key_doc, call.key_mask, partial, scores, indices)
    blocks = min(target.multiprocessors, b * -(-q // TILE_Q) * count)
    options = (call.k, call.metric == "l2", gap is not None, shift, count, length, blocks)
    steps.call("_cuda", "topk_chunks", *tensors, *options, steps.STREAM)
    return scores, indices


def backward(call: TopkChunks, outputs, grads, needs) -> list[Tensor | None]:
    """Triton's: the chosen slots alone."""
    from . import triton as topk_chunks

    return topk_chunks.backward(call, outputs, grads, needs)


def split(b: int, q: int, keys: int, multiprocessors: int) -> tuple[int, int]:
    """(parts, keys a part): the fewest parts that leave the fewest multiprocessors idle in the last round.

    >>> split(b=1, q=4096, keys=10**6, multiprocessors=132)
    (4, 250112)
    """
    tiles, blocks = -(-keys // TILE_S), b * -(-q // TILE_Q)

    def busy(parts: int) -> float:
        return round(blocks * parts / (-(-blocks * parts // multiprocessors) * multiprocessors), 2)

    most = max(1, min(tiles // _TILES_PER_SPLIT, 4 * multiprocessors // blocks))
    length = -(-tiles // max(range(1, most + 1), key=lambda parts: (busy(parts), -parts))) * TILE_S
    return -(-keys // length), length


def _aligned(tensor: Tensor) -> bool:
    return tensor.shape[-1] % 8 == 0 and all(s % 8 == 0 for s in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0
