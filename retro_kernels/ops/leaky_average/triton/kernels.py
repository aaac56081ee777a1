"""Kernels of the leaky average: an associative scan of one tile of time, a running state from tile to tile.

A step is the affine map y -> decay * y + x, and composition of maps is associative. One program has a few columns of
one head and walks over time, so x is read once and y is written once. Where too few columns fill the device, time is
cut into chunks: `_leaky_ends_kernel` computes the state at each chunk's end from a zero state at its begin, and each
program of `_leaky_scan_kernel` first combines the ends of the chunks before its own.

REVERSE runs backwards in time: then x is dy and y is dx, for g_t = dy_t + decay * g_{t+1}.

With segments, the first step of a segment has decay 0. Nothing passes a boundary, not even NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: sizes to which kernels are not specialised
SIZES = ("N", "H", "column_blocks", "chunk_len", "chunks")


@triton.jit
def _then(decay_a, x_a, decay_b, x_b):
    """First y -> decay_a * y + x_a, then y -> decay_b * y + x_b."""
    return decay_a * decay_b, x_a * decay_b + x_b


@triton.jit
def _then_in_segment(decay_a, x_a, decay_b, x_b):
    """Like `_then`, but a decay of 0 drops the state before it, because 0 * NaN would be NaN."""
    return decay_a * decay_b, tl.where(decay_b == 0.0, 0.0, x_a * decay_b) + x_b


@triton.jit
def _exactly_then(decay_a, rest_a, x_a, decay_b, rest_b, x_b):
    """Like `_then`, with the rounding error of each decay as another component: otherwise the errors of a product's
    factors add up.
    """
    decay = decay_a * decay_b
    rest = tl.fma(decay_a, decay_b, -decay) + (decay_a * rest_b + rest_a * decay_b)
    return decay, rest, tl.fma(x_a, decay_b, tl.fma(x_a, rest_b, x_b))


@triton.jit
def _exactly_then_in_segment(decay_a, rest_a, x_a, decay_b, rest_b, x_b):
    """Like `_then_in_segment`, with rounding errors like `_exactly_then`."""
    decay, rest, x = _exactly_then(decay_a, rest_a, x_a, decay_b, rest_b, x_b)
    return decay, rest, tl.where(decay_b == 0.0, x_b, x)


@triton.jit
def _goes_on(segment_at, t, N, stride_sn, REVERSE: tl.constexpr):
    """Whether step t [BLOCK_T] is in the segment of the step before it (REVERSE: after it). True for the first step of
    a sequence, which goes on from `initial`.
    """
    other = t + 1 if REVERSE else t - 1
    inside = (t >= 0) & (t < N) & (other >= 0) & (other < N)
    mine = tl.load(segment_at + t * stride_sn, mask=inside, other=0)
    theirs = tl.load(segment_at + other * stride_sn, mask=inside, other=0)
    return (mine == theirs) | (inside == 0)


@triton.jit
def _scan_tile(pointers, inside, decay, state, goes_on, SEGMENTS: tl.constexpr):
    """float32 [BLOCK_T, BLOCK_C]: the states after each step of a tile, from the state [BLOCK_C] before it."""
    x = tl.load(pointers, mask=inside, other=0.0)
    WIDE: tl.constexpr = x.dtype == tl.float32  # in a half type, rounding x outweighs the error of a tile's powers
    x = x.to(tl.float32)
    decays = tl.zeros_like(x) + decay
    if SEGMENTS:
        decays = tl.where(goes_on[:, None], decays, 0.0)
    if WIDE:
        if SEGMENTS:
            power, rest, y = tl.associative_scan((decays, tl.zeros_like(x), x), 0, _exactly_then_in_segment)
        else:
            power, rest, y = tl.associative_scan((decays, tl.zeros_like(x), x), 0, _exactly_then)
        before = (power + rest) * state[None, :]
    else:
        if SEGMENTS:
            power, y = tl.associative_scan((decays, x), 0, _then_in_segment)
        else:
            power, y = tl.associative_scan((decays, x), 0, _then)
        before = power * state[None, :]
    if SEGMENTS:
        before = tl.where(power == 0.0, 0.0, before)
    return y + before


@triton.jit
def _chunk_decay(decay, chunk_len):
    """decay ** chunk_len, a power of two, by squaring in float64: each squaring doubles the relative error."""
    power = decay.to(tl.float64)
    left = chunk_len
    while left > 1:
        power = power * power
        left = left // 2
    return power.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _leaky_ends_kernel(
    x_ptr, decay_ptr, segment_ptr, ends_ptr, unbroken_ptr,
    stride_x, stride_decay, stride_s,
    N, H, column_blocks, chunk_len, chunks,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ends [B, chunks, H, D] float32: the last state of each full chunk that starts from zero.

    unbroken [B, chunks, H * column_blocks] int32: whether the state before a chunk reaches its end, because no segment
    begins in it.
    """
    head = tl.program_id(0) // column_blocks
    head64 = head.to(tl.int64)
    column = (tl.program_id(0) % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    decay = tl.load(decay_ptr + head64 * stride_decay).to(tl.float32)
    state = tl.zeros([BLOCK_C], tl.float32)
    x_base = x_ptr + batch * stride_x.b + head64 * stride_x.h + column[None, :]
    row = tl.arange(0, BLOCK_T)
    unbroken = 1
    for first in tl.range(0, chunk_len, BLOCK_T, num_stages=STAGES):  # by default only loads of products are pipelined
        step = chunk * chunk_len + first + row
        t = (N - 1 - step if REVERSE else step).to(tl.int64)
        inside = (step < N)[:, None] & (column < D)[None, :]
        goes_on = None
        if segment_ptr is not None:
            goes_on = _goes_on(segment_ptr + batch * stride_s.b, t, N, stride_s.n, REVERSE)
            unbroken = tl.minimum(unbroken, tl.min(goes_on.to(tl.int32), 0))
        y = _scan_tile(x_base + t[:, None] * stride_x.n, inside, decay, state, goes_on, segment_ptr is not None)
        state = tl.sum(tl.where((row == BLOCK_T - 1)[:, None], y, 0.0), 0)
    tl.store(ends_ptr + ((batch * chunks + chunk) * H + head) * D + column, state, mask=column < D)
    if segment_ptr is not None:
        tl.store(unbroken_ptr + (batch * chunks + chunk) * (H * column_blocks) + tl.program_id(0), unbroken)


@triton.jit(do_not_specialize=SIZES)
def _leaky_scan_kernel(
    x_ptr, decay_ptr, initial_ptr, segment_ptr, ends_ptr, unbroken_ptr, y_ptr, past_ptr, dinitial_ptr, ddecay_ptr,
    stride_x, stride_decay, stride_s, stride_i, stride_p,
    N, H, column_blocks, chunk_len, chunks,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of time of one block of columns. y [B,N,H,D] is contiguous, or None where it is not wanted.

    REVERSE only: past is the forward pass's y; ddecay [B, chunks, H, column_blocks] gets the sum of g_t * y_{t-1};
    dinitial [B,H,D].
    """
    head = tl.program_id(0) // column_blocks
    head64 = head.to(tl.int64)
    block = tl.program_id(0) % column_blocks
    column = block * BLOCK_C + tl.arange(0, BLOCK_C)
    column_mask = column < D
    chunk, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    decay = tl.load(decay_ptr + head64 * stride_decay).to(tl.float32)
    state = tl.zeros([BLOCK_C], tl.float32)
    initial = tl.zeros([BLOCK_C], tl.float32)
    if initial_ptr is not None:
        initial = tl.load(
            initial_ptr + batch * stride_i.b + head64 * stride_i.h + column, mask=column_mask, other=0.0
        ).to(tl.float32)
        if not REVERSE:
            state = initial
    if ends_ptr is not None:
        power = _chunk_decay(decay, chunk_len)
        for earlier in range(0, chunk):
            end = tl.load(ends_ptr + ((batch * chunks + earlier) * H + head) * D + column, mask=column_mask, other=0.0)
            if segment_ptr is not None:
                unbroken = tl.load(unbroken_ptr + (batch * chunks + earlier) * (H * column_blocks) + tl.program_id(0))
                state = tl.where(unbroken != 0, state * power, 0.0) + end
            else:
                state = state * power + end

    x_base = x_ptr + batch * stride_x.b + head64 * stride_x.h + column[None, :]
    row = tl.arange(0, BLOCK_T)
    stop = tl.minimum((chunk + 1) * chunk_len, N)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)  # reduced once at the end: many short sums round less
    for first in tl.range(chunk * chunk_len, stop, BLOCK_T, num_stages=STAGES):
        step = first + row
        t = (N - 1 - step if REVERSE else step).to(tl.int64)
        inside = (step < N)[:, None] & column_mask[None, :]
        goes_on = None
        if segment_ptr is not None:
            goes_on = _goes_on(segment_ptr + batch * stride_s.b, t, N, stride_s.n, REVERSE)
        y = _scan_tile(x_base + t[:, None] * stride_x.n, inside, decay, state, goes_on, segment_ptr is not None)
        last = tl.minimum(BLOCK_T, N - first) - 1  # the state decays in steps past the end
        state = tl.sum(tl.where((row == last)[:, None], y, 0.0), 0)
        if y_ptr is not None:
            y_at = y_ptr + ((batch * N + t) * H + head)[:, None] * D + column[None, :]
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
        if ddecay_ptr is not None:
            past_at = (
                past_ptr + batch * stride_p.b + head64 * stride_p.h + (t - 1)[:, None] * stride_p.n + column[None, :]
            )
            past = tl.load(past_at, mask=inside & (t > 0)[:, None], other=0.0).to(tl.float32)
            past = tl.where((t == 0)[:, None], initial[None, :], past)
            if segment_ptr is not None:
                past = tl.where(_goes_on(segment_ptr + batch * stride_s.b, t, N, stride_s.n, False)[:, None], past, 0.0)
            total += tl.where(inside, y * past, 0.0)
    if ddecay_ptr is not None:
        slot = ((batch * chunks + chunk) * H + head) * column_blocks + block
        tl.store(ddecay_ptr + slot, tl.sum(tl.sum(total, 0), 0))
    if dinitial_ptr is not None:  # noqa: SIM102, a None pointer is decided at compile time
        if chunk == chunks - 1:  # the state is now g_0, and y_0 = x_0 + decay * initial
            first_at = dinitial_ptr + (batch * H + head) * D + column
            tl.store(first_at, (state * decay).to(dinitial_ptr.dtype.element_ty), mask=column_mask)
