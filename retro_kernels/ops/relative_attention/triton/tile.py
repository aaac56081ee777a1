"""Functions of the kernels of relative attention: the keys that a query block sees, and position logits along a row of
tiles.

Query i and key j have displacement d = i + offset - j and table row t = d - rel_start. Three conditions make a key
visible:

    first_key(i) <= j <= last_key(i)     the window, the causal gap, and the number of keys, as two integers a row
    seen[j]                              the key mask
    query_segment[i] == key_segment[j]   packed documents

Along a row of tiles (fixed queries, keys ascending by BLOCK_N) the band of table rows moves down by BLOCK_N. The upper
block of a tile's band is the lower block of the tile before (see `triton_lib.position_logits`), so the walk keeps that
block's product. Each tile takes one product with BLOCK_N new table rows, which costs as much as its content logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.position_logits import band_block, reverse_skew, table_product

#: sizes and positions to which kernels are not specialised, not even to divisibility by 16
PLAIN_SIZES = ("N", "S", "H", "HEADS_PER_GROUP", "offset", "causal_gap", "window")
SIZES = (*PLAIN_SIZES, "T", "rel_start", "blocks", "keys_per_split", "dropout_limit")
SIZES += ("first_batch", "first_block", "first_head", "heads", "ring")  # sizes of a slab
# sizes of the products of a slab
SIZES += ("X", "count", "per_first", "per_second", "per_item", "items", "last_item", "again")
NO_WINDOW = tl.constexpr(1 << 30)  # keys: longer than any call
# Queries that a warp group multiplies at a time. Tiles with fewer queries compute products transposed, with keys
# along the rows. Other tiles have queries along the rows: a query's lse, delta, first and last key then take
# two registers per thread instead of a column each.
TALL = tl.constexpr(64)


@triton.jit
def row_limits(i, S, offset, causal_gap, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """(first_key, last_key) of each query, int32 [BLOCK_M]; no key is visible if the first is past the last.

    WINDOW: "none", "sliding" (the last `window` positions) or "blocks" (the block of `window` positions and the one
    before it).
    """
    last = tl.zeros_like(i) + (S - 1)
    if CAUSAL:
        last = tl.minimum(last, i + offset - causal_gap)
    first = tl.zeros_like(i)
    if WINDOW == "sliding":
        first = tl.maximum(first, i + offset - window + 1)
    if WINDOW == "blocks":  # at a position below 0 the maximum is 0, whether the division rounds down or to 0
        first = tl.maximum(first, ((i + offset) // window - 1) * window)
    return first, last


@triton.jit
def narrow(
    low, high, segment_ptr, stride_segment, mask_ptr, stride_mask, smallest, largest, BLOCK: tl.constexpr = 2048
):
    """The part of [low, high) from the first to the last unmasked index with a segment in [smallest, largest].

    BLOCK: indices that a step loads. It is large, because the whole row is searched and each step waits for its loads.
    """
    # if the window or the gap hides the range, low is past high: the result is then empty
    high = tl.maximum(low, high)
    first, last = high, low
    for start in range(low, high, BLOCK):
        j = start + tl.arange(0, BLOCK)
        hit = j < high
        if mask_ptr is not None:
            hit = hit & (tl.load(mask_ptr + j * stride_mask, mask=j < high, other=0) != 0)
        if segment_ptr is not None:
            segment = tl.load(segment_ptr + j * stride_segment, mask=j < high, other=0)
            hit = hit & (segment >= smallest) & (segment <= largest)
        first = tl.minimum(first, tl.min(tl.where(hit, j, high), 0))
        last = tl.maximum(last, tl.max(tl.where(hit, j + 1, low), 0))
    return first, tl.maximum(first, last)


@triton.jit
def whole_tiles(begin, end, BLOCK: tl.constexpr):
    """[begin, end) extended to the begin of a tile. An empty range stays empty, because its tile may belong to another
    split or be past the last key.
    """
    start = begin // BLOCK * BLOCK
    return start, tl.where(begin < end, end, start)


@triton.jit
def load_segments(segment_ptr, index, inside, start, stride):
    """(segments, smallest, largest) of a block. An index outside gets the first segment, which changes no bound."""
    first = tl.load(segment_ptr + start * stride)
    segments = tl.where(inside, tl.load(segment_ptr + index * stride, mask=inside, other=0), first)
    return segments, tl.min(segments, 0), tl.max(segments, 0)


@triton.jit
def seen_keys(j, S, mask_ptr, stride_mask):
    """bool [BLOCK_N]: keys that exist and are not masked."""
    if mask_ptr is None:
        return j < S
    else:
        return tl.load(mask_ptr + j * stride_mask, mask=j < S, other=0) != 0


@triton.jit
def visible_pairs(
    j, seen, first_key, last_key, query_segment, segment_ptr, S, stride_segment, MASKED: tl.constexpr = True
):
    """bool [BLOCK_M, BLOCK_N]. Without MASKED all keys up to last_key are in `seen`."""
    visible = (j[None, :] <= last_key[:, None]) & (j[None, :] >= first_key[:, None])
    if MASKED:
        visible = visible & seen[None, :]
    if segment_ptr is not None:
        key_segment = tl.load(segment_ptr + j * stride_segment, mask=j < S, other=0)
        visible = visible & (query_segment[:, None] == key_segment[None, :])
    return visible


@triton.jit
def table_span(begin, end, low, high, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """The range of the tiles begin, begin + BLOCK, ... < end that the table reaches: those at low <= x < high. Tiles
    before and after have no position logits.
    """
    start, stop = begin, end
    if BOUNDED:
        start = tl.minimum(begin + tl.cdiv(tl.maximum(low - begin, 0), BLOCK) * BLOCK, end)
        stop = tl.maximum(start, tl.minimum(begin + tl.cdiv(tl.maximum(high - begin, 0), BLOCK) * BLOCK, end))
    return start, stop


@triton.jit
def scalar_position(rq_ptr, bias_ptr, rel_ptr, i, row_mask, t, rows, stride_rq, stride_t):
    """float32 [BLOCK_M, BLOCK_N] position logits for E = 1: the table's numbers at t [BLOCK_M, BLOCK_N] times rq."""
    rq = tl.load(rq_ptr + i.to(tl.int64) * stride_rq, mask=row_mask, other=0.0)
    if bias_ptr is not None:
        rq = (rq.to(tl.float32) + tl.load(bias_ptr).to(tl.float32)).to(rq.dtype)
    inside = (t >= 0) & (t < rows)
    rel = tl.load(rel_ptr + tl.where(inside, t, 0) * stride_t, mask=inside, other=0.0)
    return rq.to(tl.float32)[:, None] * rel.to(tl.float32)


@triton.jit
def skewed_block(
    source, bias_ptr, first, zero,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """`table_product` of one block of the band, permuted by `reverse_skew`.

    source: the relative query, its address, and the address, the number of rows and the row stride of the table.
    """
    rq, rq_from, rel_ptr, rows, stride_t = source
    block = table_product(  # [BLOCK_M, BLOCK_N]
        rq, rq_from, bias_ptr, rel_ptr, first, rows, stride_t, zero, E, BLOCK_N, BLOCK_E, PRECISION, TRANSPOSED
    )
    return reverse_skew(block, zero, BLOCK_M, BLOCK_N)


@triton.jit
def walk_step(lower, upper, uppermost, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Position logits of a tile from the blocks of its band, each from `skewed_block`. BLOCK_M is at most 2 * BLOCK_N;
    `uppermost` is used only where it exceeds BLOCK_N.
    """
    block_of = band_block(zero, BLOCK_M, BLOCK_N)
    position = tl.where(block_of == 0, lower, upper)
    if BLOCK_M > BLOCK_N:
        position = tl.where(block_of == 2, uppermost, position)
    return position
