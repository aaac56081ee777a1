"""Storage of the probabilities P and of the logits' gradient dS, which the query kernel writes for the products with
them.

A slab is a part of the call whose tiles fit in `STORED_BYTES`: some heads, batch entries and query blocks. Each slab
adds to the gradients that earlier slabs have written, so gradients are summed in the order of the slabs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl

from ....triton_lib.products import opaque_zero
from ..call import RelativeAttention
from .tile import row_limits

#: Bound in bytes of a slab's tiles. A single block of queries of one head may take more. A smaller bound makes more
#: launches. Layouts that are known keep their slabs.
STORED_BYTES = 512 << 20
_MOST_ELEMENTS = 2**31  # elements of one head, because offsets within a head have 32 bits


class Slab(NamedTuple):
    """First and number of the batch entries, query blocks and heads that the launches of a slab serve."""

    first_batch: int
    batches: int
    first_block: int
    blocks: int
    first_head: int
    heads: int


def width(call: RelativeAttention, block_m: int, block_n: int) -> tuple[int, int | None]:
    """Return (columns, ring): key j is stored in column j & ring, or j if ring is None.

    With a window, a block of queries sees few keys, so the columns form a ring buffer.
    """
    keys = -(-call.key.shape[1] // block_n) * block_n
    seen = call.window or 2 * (call.window_block or 0)
    if call.causal and seen:
        ring = 1 << (seen + block_m + 2 * block_n - 1).bit_length()
        if ring < keys:
            return ring, ring - 1
    return keys, None


def slabs(call: RelativeAttention, columns: int, block_m: int, tensors: int) -> Iterator[Slab]:
    """Yield the slabs of a call in the order in which they are summed; the first is the largest.

    tensors: number of stored tensors. A slab has whole groups of heads, or an equal part of one group.
    """
    b, n, h, _ = call.query.shape
    blocks = -(-n // block_m)
    bytes_of = tensors * block_m * columns * call.query.element_size()  # a block of queries
    most = max(STORED_BYTES // bytes_of, 1)
    at_once = min(blocks, most, max(_MOST_ELEMENTS // (block_m * columns), 1))
    batches = min(b, max(most // at_once, 1)) if at_once == blocks else 1
    heads = min(h, max(most // (at_once * batches), 1)) if batches == b else 1
    per_group = h // call.key.shape[2]
    heads = max(x for x in range(1, heads + 1) if x % per_group == 0 or per_group % x == 0)
    for head, batch, block in itertools.product(range(0, h, heads), range(0, b, batches), range(0, blocks, at_once)):
        yield Slab(batch, min(batches, b - batch), block, min(at_once, blocks - block), head, min(heads, h - head))


@triton.jit
def store_tile(slab_ptr, item, tile, j0, stride_tile, ring, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile [BLOCK_M, BLOCK_N] in the rows of its query block, at column j modulo the slab's width."""
    # the address depends on j0, so that it takes no registers throughout the loop
    at = slab_ptr + (tl.full([], 0, tl.int64) + item + opaque_zero(j0)) * BLOCK_M * stride_tile
    row = opaque_zero(j0) + tl.arange(0, BLOCK_M)
    column = (j0 if ring is None else tl.multiple_of(j0 & ring, BLOCK_N)) + tl.arange(0, BLOCK_N)
    tl.store(at + (row[:, None] * stride_tile + column[None, :]), tile.to(slab_ptr.dtype.element_ty))


@triton.jit
def stored_keys(
    i, row, row_mask, limits, span_at,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """[low, high) of the keys that are stored for each query, in whole tiles.

    row: index of the query in the slab. limits: S, offset, gap and window of `row_limits`.
    """
    S, offset, causal_gap, window = limits
    first_key, last_key = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
    if span_at is not None:
        block = row // QUERY_BLOCK
        first_key = tl.maximum(first_key, tl.load(span_at + 2 * block, mask=row_mask, other=0))
        last_key = tl.minimum(last_key, S - 1 - tl.load(span_at + 2 * block + 1, mask=row_mask, other=0))
    some = row_mask & (first_key <= last_key)
    low = first_key // KEY_BLOCK * KEY_BLOCK
    return low, tl.where(some, last_key // KEY_BLOCK * KEY_BLOCK + KEY_BLOCK, 0)


@triton.jit
def joined(
    start, nearest, limits, span_at, count,
    BLOCK_N: tl.constexpr, QUERY_BLOCK: tl.constexpr, SKEWED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr = 128,
):  # fmt: skip
    """[first, last) of the slab's query blocks that see one of the BLOCK_N keys from `nearest` on; SKEWED: the keys of
    query i begin at nearest + i.

    start: the slab's first query. limits: as in `stored_keys`. For keys or displacements that no query sees the range
    is empty.
    """
    S, offset, causal_gap, window = limits
    first, last = count, 0
    for begin in range(0, count, BLOCK):
        block = begin + tl.arange(0, BLOCK)
        i = start + block * QUERY_BLOCK
        low, _ = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
        _, high = row_limits(i + QUERY_BLOCK - 1, S, offset, causal_gap, window, CAUSAL, WINDOW)
        if span_at is not None:
            low = tl.maximum(low, tl.load(span_at + 2 * block, mask=block < count, other=0))
            high = tl.minimum(high, S - 1 - tl.load(span_at + 2 * block + 1, mask=block < count, other=0))
        least, extent = nearest, BLOCK_N
        if SKEWED:
            least, extent = nearest + i, QUERY_BLOCK + BLOCK_N - 1
        hit = (block < count) & (low <= high) & (low < least + extent) & (high >= least)
        first = tl.minimum(first, tl.min(tl.where(hit, block, count), 0))
        last = tl.maximum(last, tl.max(tl.where(hit, block + 1, 0), 0))
    return first, last
