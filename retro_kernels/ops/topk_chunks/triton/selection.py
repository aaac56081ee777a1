"""Running top-k lists of packed candidates in registers, for the scan and the merge.

A candidate is one int64: the score's bits, mapped so that signed comparison orders them, above the inverted key index.
Larger means a higher score or, at equal scores, a lower index; no two keys pack to the same value.

    score 1.5 of key 7  ->  0x3FC00000_7FFFFFF8        score -1.5 of key 7  ->  0xC03FFFFF_7FFFFFF8

An empty slot is (-inf, a slot number). It is below every candidate, because a score of -inf is not a candidate, and
differs from every other empty slot, so that replacing the weakest slot replaces exactly one.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: indices are stored as index ^ LAST_INDEX = LAST_INDEX - index; the last 2**7 values are for empty slots
LAST_INDEX = tl.constexpr(0x7FFFFFFF)
#: most keys of a scan; the rest of 2**31 is for empty slots and the round-up to a tile
MAX_KEYS = 0x7FFFFFFF - 0x10000
#: above every candidate; its score is NaN, which no score exceeds. It fills the slots that rounding k up to a power of
#: two adds, so that the weakest slot is the k-th.
FULL = tl.constexpr(0x7FFFFFFF00000000)
#: below every candidate and every empty slot
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def _ordered(bits):
    """float32 bits <-> int32 that compares like the float (its own inverse)."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(score, index):
    # -0.0 equals 0.0, so both must have the same bits
    score = tl.where(score == 0.0, 0.0, score)
    high = _ordered(score.to(tl.int32, bitcast=True)).to(tl.int64) << 32
    return high | (index ^ LAST_INDEX).to(tl.int64)


@triton.jit
def score_of(packed):
    return _ordered((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ LAST_INDEX


@triton.jit
def empty_list(k, BLOCK_Q: tl.constexpr, SLOTS: tl.constexpr):
    """[BLOCK_Q, SLOTS]: SLOTS - k slots that are never replaced, then k empty ones."""
    slot = tl.arange(0, SLOTS)
    empty = pack(tl.full([SLOTS], float("-inf"), tl.float32), slot ^ LAST_INDEX)
    row = tl.where(slot < SLOTS - k, slot.to(tl.int64) + FULL, empty)
    return tl.broadcast_to(row[None, :], [BLOCK_Q, SLOTS])


@triton.jit
def absorb_scores(best, score, index):
    """`best` [BQ,SLOTS] after the tile `score` [BQ,BS] (-inf: no candidate) of the keys `index` [BS].

    The keys must come after all earlier ones. Later keys lose ties, so scores are compared with the k-th score alone,
    and a tile without a higher score costs one maximum. Otherwise each round inserts the best score of every row, until
    none is above its row's k-th.
    """
    floor = tl.min(best, 1)
    top = tl.max(score, 1)
    while tl.max((top > score_of(floor)).to(tl.int32), 0) > 0:
        first = tl.min(tl.where(score == top[:, None], index[None, :], LAST_INDEX), 1)
        enters = top > score_of(floor)
        best = tl.where(enters[:, None] & (best == floor[:, None]), pack(top, first)[:, None], best)
        score = tl.where(index[None, :] == first[:, None], float("-inf"), score)
        floor = tl.min(best, 1)
        top = tl.max(score, 1)
    return best


@triton.jit
def absorb_packed(best, packed):
    """`best` [BQ,SLOTS] after the candidates `packed` [BQ,BN], in any order. None may be in `best` already."""
    # empty slots of different lists have equal values, so they are dropped
    packed = tl.where(score_of(packed) == float("-inf"), _NOTHING, packed)
    floor = tl.min(best, 1)
    top = tl.max(packed, 1)
    while tl.max((top > floor).to(tl.int32), 0) > 0:
        enters = top > floor
        best = tl.where(enters[:, None] & (best == floor[:, None]), top[:, None], best)
        packed = tl.where(packed == top[:, None], _NOTHING, packed)
        floor = tl.min(best, 1)
        top = tl.max(packed, 1)
    return best


@triton.jit
def store_sorted(scores_ptr, indices_ptr, best, row, row_ok, k):
    """Store `best`, descending, to rows `row` of scores [rows,k] and indices [rows,k]; -inf and -1 in empty slots."""
    # k rounds, each of which takes the best: a sort of packed pairs would fill the registers
    best = tl.where(best >= FULL, _NOTHING, best)
    row = row.to(tl.int64) * k
    for slot in range(0, k):
        top = tl.max(best, 1)
        best = tl.where(best == top[:, None], _NOTHING, best)
        score = score_of(top)
        index = tl.where(score == float("-inf"), -1, index_of(top))
        tl.store(scores_ptr + row + slot, score, mask=row_ok)
        tl.store(indices_ptr + row + slot, index.to(tl.int64), mask=row_ok)
