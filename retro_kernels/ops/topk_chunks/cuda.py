"""Exact top-k of thousands of queries: tensor-core tiles, per-row thresholds, lists merged at the end
(csrc/cuda/topk_chunks.cu).

The kernel multiplies by wgmma on sm_90 and by mma.sync elsewhere. It is chosen for calls that arithmetic bounds. Calls
with fewer queries are bound by reading the keys, and Triton is as fast there (`slower`). The gradient is Triton's.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ... import extensions
from ...compile.target import OLDEST_ARCH, Target, current_target
from .call import TopkChunks
from .splits import aligned, split

#: queries below which reading the keys takes longer than multiplying them
#: (H100: 990 TFLOP/s over 3.35 TB/s is 295 FLOP a byte, and q queries make q FLOP a byte of 16-bit keys)
LEAST_QUERIES = 512
#: bound of key numbers: rounded up to a tile, they fit int32
MAX_KEYS = 2**30
TILE_Q, TILE_S = 128, 256  # TOPK_TILE_Q and TOPK_TILE_S in csrc/cuda/topk_chunks.h
#: shared memory of a block of the scan, TOPK_CHUNKS_SCAN_WGMMA (sm_90) and TOPK_CHUNKS_SCAN in csrc/cuda/topk_chunks.h
SHARED_BYTES_WGMMA, SHARED_BYTES = 208416, 159264
TILES_PER_SPLIT = 8  # least number of tiles that a split scans


def unsupported(call: TopkChunks) -> str | None:
    query, key = call.query, call.key
    for name, tensor in (("query", query), ("key", key)):
        if tensor.device.type != "cuda":
            return f"{name} is on {tensor.device}, not on a cuda device"
    return unsupported_on(call, current_target(query.device))


def unsupported_on(call: TopkChunks, target: Target) -> str | None:
    """Why the kernel can't serve the call on the target, by types and sizes."""
    query, key = call.query, call.key
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            return f"{name} is {tensor.dtype}; have bfloat16, float16 (float32 is not served yet: triton serves it)"
    if target.backend != "cuda":
        return f"the kernel is CUDA C++; the GPU is {target.name}"
    if target.arch < OLDEST_ARCH:
        return f"sm_{target.arch} has no asynchronous copies; needs sm_{OLDEST_ARCH}"
    shared = SHARED_BYTES_WGMMA if target.arch // 10 == 9 else SHARED_BYTES
    if shared > target.shared_memory:
        return f"a block needs {shared} bytes of shared memory; sm_{target.arch} has {target.shared_memory}"
    if key.shape[1] > MAX_KEYS or query.shape[1] > MAX_KEYS:
        return f"Q={query.shape[1]}, S={key.shape[1]}: one exceeds {MAX_KEYS}"
    if not (aligned(query, 8) and aligned(key, 8)):
        return "rows must start at multiples of 16 bytes, and D be a multiple of 8"
    for name, docs in (("query_doc", call.query_doc), ("key_doc", call.key_doc)):
        if docs is not None and docs.dtype not in (torch.int64, torch.int32):
            return f"{name} is {docs.dtype}; have int64, int32"
    return None


def slower(call: TopkChunks) -> str | None:
    """Why triton serves the call faster, if it is installed."""
    there = importlib.util.find_spec("triton") is not None
    return slower_on(call, current_target(call.query.device)) if there else None


def slower_on(call: TopkChunks, target: Target) -> str | None:
    """Why triton serves the call faster on the target."""
    if call.query.shape[1] < LEAST_QUERIES:
        limit = f"below {LEAST_QUERIES} queries the keys' bandwidth is the limit, and triton reaches it"
        return f"Q={call.query.shape[1]}: {limit}"
    if target.arch >= 100:
        return f"on sm_{target.arch} triton uses tcgen05, this kernel mma.sync"
    return None


def forward(call: TopkChunks) -> tuple[Tensor, Tensor]:
    query = call.query
    b, q, _ = query.shape
    target = current_target(query.device)
    tiles = b * -(-q // TILE_Q)
    count, length = split(call.key.shape[1], TILE_S, tiles, target.multiprocessors, TILES_PER_SPLIT)
    scores, indices = call.empty_outputs()
    partial = indices.new_empty((b, q, count, call.k))
    tensors = (query, call.key, call.query_doc, call.key_doc, call.key_mask, partial, scores, indices)
    blocks, causal = min(target.multiprocessors, tiles * count), call.causal_gap is not None
    options = (call.k, call.metric == "l2", causal, call.shift(call.query_offset), count, length, blocks)
    views = map(extensions.view, tensors)
    error = extensions.extension("_cuda").topk_chunks(*views, *options, torch.cuda.current_stream().cuda_stream)
    if error:
        raise RuntimeError(f"topk_chunks: CUDA error {error} at launch")
    return scores, indices


def backward(call: TopkChunks, outputs, grads, needs) -> list[Tensor | None]:
    from . import triton

    return triton.backward(call, outputs, grads, needs)
