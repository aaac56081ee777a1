"""Probabilities P and the logits' gradient dS, kept by the query kernel for the products with them: how much at a time,
and where a tile lies.

Slabs of heads, then of batch entries, then of query blocks, each as large as `STORED_BYTES` allow: what one slab has
left of a gradient the next adds to, so the order of the sum is that of the slabs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl

from ..call import RelativeAttention
from .tile import row_limits

#: Bound in bytes of what a slab stores. A single block of queries of one head may take more. A smaller bound makes more
#: launches. A plan that was made keeps its slabs.
STORED_BYTES = 512 << 20
#: parameters of the kernels that say which slab a launch serves
SLAB = ("first_batch", "first_block", "first_head", "heads", "ring")
_MOST_ELEMENTS = 2**31  # of one head: offsets within it are 32 bits


@dataclasses.dataclass(frozen=True)
class Slab:
    """Batch entries, query blocks and heads that two launches serve, `first` ones and how many."""

    first_batch: int
    batches: int
    first_block: int
    blocks: int
    first_head: int
    heads: int

    def arguments(self) -> dict[str, int]:
        """Return the kernels' arguments that name the slab."""
        names = ("first_batch", "first_block", "first_head", "heads")
        return {name: getattr(self, name) for name in names}

    def again(self, apart: bool) -> bool:
        """Whether an earlier slab had heads of the same table. apart: each head has a table of its own."""
        return bool(self.first_batch or self.first_block or (self.first_head and not apart))


def width(call: RelativeAttention, block_m: int, block_n: int) -> tuple[int, int | None]:
    """(columns, ring): key j stands in column j & ring, or j.

    Where a window ends what a block of queries sees, columns are used in turn.
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

    tensors: how many store one. A slab has whole groups of heads, or equal parts of one.
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
    for head in range(0, h, heads):
        for batch in range(0, b, batches):
            for block in range(0, blocks, at_once):
                yield Slab(
                    batch,
                    min(batches, b - batch),
                    block,
                    min(at_once, blocks - block),
                    head,
                    min(heads, h - head),
                )


@triton.jit
def store_tile(slab_ptr, item, tile, j0, stride_tile, ring, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N] into the rows of its query block, column j modulo the slab's width."""
    # made here: else it takes registers throughout the loop
    at = slab_ptr + (tl.full([], 0, tl.int64) + item + (j0 >> 30)) * BLOCK_M * stride_tile
    row = (j0 >> 30) + tl.arange(0, BLOCK_M)
    column = (j0 if ring is None else tl.multiple_of(j0 & ring, BLOCK_N)) + tl.arange(0, BLOCK_N)
    tl.store(at + (row[:, None] * stride_tile + column[None, :]), tile.to(slab_ptr.dtype.element_ty))


@triton.jit
def stored_keys(
    i,
    row,
    row_mask,
    S,
    offset,
    causal_gap,
    window,
    span_at,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """[low, high) of the keys that were stored for each query, in whole tiles; row: the query within the slab."""
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
    start,
    nearest,
    S,
    offset,
    causal_gap,
    window,
    span_at,
    count,
    BLOCK_N: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    SKEWED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr = 128,
):
    """[first, last) of the slab's query blocks that see one of BLOCK_N keys from `nearest` on; SKEWED: from nearest + i
    of each query on.

    start: the slab's first query. Keys or displacements that no query sees, longer than the window or every document,
    cost this search alone.
    """
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
