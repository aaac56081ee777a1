"""Functions of the kernels of chunked cross-attention: visible keys, gates, positions and one tile's gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import dropped, weight_of
from ....triton_lib.positions import position_of

#: sizes and positions to which kernels are not specialised, not even to divisibility by 16
SIZES = ("N", "M", "K", "R", "H", "L", "T", "HEADS_PER_GROUP", "rel_start", "query_start", "first_chunk", "chunks")
SIZES += ("blocks", "items", "items_per_split", "key_blocks", "dropout_limit")
SIZES += ("keys_per_split", "neighbours_per_split", "neighbour_splits")


@triton.jit
def visible_keys(mask_ptr, stride_mr, j, R, MASK_TOKENS: tl.constexpr):
    """bool [BLOCK_N]: tokens of a neighbour that can be attended. mask_ptr points to the neighbour's first entry."""
    if mask_ptr is None:
        visible = j < R
    elif MASK_TOKENS:
        visible = tl.load(mask_ptr + j * stride_mr, mask=j < R, other=0) != 0
    else:
        visible = j < tl.where(tl.load(mask_ptr) != 0, R, 0)
    return visible


@triton.jit
def load_gate(gate_ptr, visible, MASKED: tl.constexpr):
    """float32 gate of a neighbour; 0 if none of its tile is visible, because a masked neighbour's gate may be NaN."""
    gate = tl.load(gate_ptr).to(tl.float32)
    if MASKED:
        gate = tl.where(tl.max(visible.to(tl.int32), 0) > 0, gate, 0.0)
    return gate


@triton.jit
def first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch):
    """(position of query 0, chunk that the first row attends): the call's, or from the batch entry's own position."""
    if batch_start_ptr is not None:
        query_start = position_of(query_start, batch_start_ptr, stride_batch_start, batch)
        following = query_start + 1
        # round down; the division rounds to 0
        first_chunk = tl.where(following < 0, following - M + 1, following) // M - 1
    return query_start, first_chunk


@triton.jit
def has_keys(chunk, L, OWN_STARTS: tl.constexpr):
    """Whether the key tensor has the chunk. Tokens before the first complete chunk attend nothing, nor do tokens after
    the last chunk, which occur only with OWN_STARTS: otherwise the host has checked the number of chunks.
    """
    if OWN_STARTS:
        return (chunk >= 0) & (chunk < L)
    else:
        return chunk >= 0


@triton.jit
def locate(
    pid, H, M, first_chunk, chunks, blocks, query_start, batch_start_ptr, stride_batch_start, BLOCK_M: tl.constexpr
):
    """head, item, block, chunk, batch (int64), first row of the chunk, first row of the tile. An item is one (batch,
    chunk, time block).
    """
    head, item = pid % H, pid // H
    block = item % blocks
    batch = (item // (blocks * chunks)).to(tl.int64)
    query_start, first_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
    chunk = first_chunk + item // blocks % chunks
    # tiles start at index 0 of the attending chunk, so that all chunks' bands have the same table rows
    first_row = (chunk + 1) * M - 1 - query_start
    return head, item, block, chunk, batch, first_row, first_row + block * BLOCK_M


@triton.jit
def tile_gradients(content, dp, position, lse2, delta, visible, gate, scale2, seed_ptr, dropout, place):
    """(probabilities that the values were multiplied by, gradient of the logits) of one tile.

    content: (q + u) k^T. dp: do v^T. position, visible, gate: None if the call has none. scale2: scale * log2(e). lse2:
    in base 2, +inf for a row that attends nothing, which makes its probabilities 0. dropout: limit and scale. place:
    indices of the keys [BLOCK_N] and of the queries [BLOCK_M], head and batch.
    """
    key_index, n, head, batch = place
    logits = content
    if gate is not None:
        logits = logits * gate
    if position is not None:
        logits = logits + position
    p = weight_of(logits * scale2 - lse2[:, None])
    if visible is not None:
        p = tl.where(visible[None, :], p, 0.0)
    kept, dp = dropped(p, dp, seed_ptr, dropout, (key_index[None, :], n[:, None], head, batch))
    if gate is not None:
        dp = dp * gate
    ds = p * (dp - delta[:, None])
    return kept, ds
