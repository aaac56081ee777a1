"""Kernels whose times others published, and the launch of each on meta tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launches import Launch


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * width + column, e / tl.sum(e, 0), mask=column < width)


@triton.jit
def _softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * width + column, y * (dy - tl.sum(y * dy, 0)), mask=column < width)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, out_ptr, mean_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    w, b = tl.load(w_ptr + column, mask=inside, other=0.0), tl.load(b_ptr + column, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / width
    apart = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(apart * apart, 0) / width + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * width + column, apart * rstd * w + b, mask=inside)


@triton.jit
def _rms_norm_kernel(x_ptr, w_ptr, out_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * width + column, (x * rstd).to(w.dtype) * w, mask=inside)


@triton.jit
def _rms_norm_rows_kernel(x_ptr, w_ptr, out_ptr, rows, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = row[:, None] * WIDTH + column[None, :], row[:, None] < rows
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(out_ptr + at, x * rstd[:, None] * tl.load(w_ptr + column)[None, :].to(tl.float32), mask=inside)


@triton.jit
def _relu_squared_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.maximum(x, 0.0)
    tl.store(out_ptr + row * width + column, x * x, mask=column < width)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """x holds gate and up side by side."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, (gate * tl.sigmoid(gate)).to(up.dtype) * up, mask=inside)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [M,N] = A [M,K] B [K,N]; programs in groups of GROUP rows of blocks, which share B's columns in L2."""
    program = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * blocks_n) * GROUP
    height = min(blocks_m - first, GROUP)
    within = program % (GROUP * blocks_n)
    row = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + row[:, None] * K + k[None, :]
    b_at = b_ptr + k[:, None] * stride_bk + column[None, :] * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_at), tl.load(b_at), acc)  # [BLOCK_M, BLOCK_N]
        a_at += BLOCK_K
        b_at += BLOCK_K * stride_bk
    tl.store(c_ptr + row[:, None].to(tl.int64) * N + column[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def _flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, N, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Attention forward of one head, not causal: [batch * heads, N, D] each."""
    head = tl.program_id(1).to(tl.int64) * N * D
    row, column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + head + row[:, None] * D + column[None, :])  # [BLOCK_M, D]
    high, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first in range(0, N, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + head + key[None, :] * D + column[:, None])  # [D, BLOCK_N]
        s = tl.dot(q, k)  # [BLOCK_M, BLOCK_N]
        new = tl.maximum(high, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - new[:, None])
        alpha = tl.math.exp2(high - new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_ptr + head + key[:, None] * D + column[None, :])  # [BLOCK_N, D]
        acc = tl.dot(p.to(v.dtype), v, acc)  # [BLOCK_M, D]
        high = new
    tl.store(lse_ptr + tl.program_id(1) * N + row, high + tl.math.log2(total))
    tl.store(out_ptr + head + row[:, None] * D + column[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty))


def _empty(dtype: str, names: str, *shape: int) -> dict[str, torch.Tensor]:
    """Return tensors by the names of a kernel's pointers."""
    return {f"{name}_ptr": torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name in names.split()}


def _launch(kernel, grid: tuple[int, ...], arguments: dict, warps: int, stages: int) -> Launch:
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return Launch(kernel, grid, arguments, options)


def liger_warps(block: int) -> int:
    """Warps that Liger-Kernel's `calculate_settings` gives a row of `block` elements."""
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def add(dtype: str, n: int) -> Launch:
    return _launch(add_kernel, (-(-n // 1024),), {**_empty(dtype, "x y out", n), "n": n, "BLOCK": 1024}, 4, 1)


def _rows(kernel, rows: int, width: int, arguments: dict, warps: int | None = None) -> Launch:
    """Return a launch of a program a row. warps: None: as Liger-Kernel's."""
    block = triton.next_power_of_2(width)
    return _launch(kernel, (rows,), {**arguments, "width": width, "BLOCK": block}, warps or liger_warps(block), 1)


def softmax(dtype: str, rows: int, width: int) -> Launch:
    return _rows(_softmax_kernel, rows, width, _empty(dtype, "x out", rows, width), 4)


def softmax_backward(dtype: str, rows: int, width: int) -> Launch:
    return _rows(_softmax_backward_kernel, rows, width, _empty(dtype, "y dy dx", rows, width), 4)


def layer_norm(dtype: str, rows: int, width: int, warps: int | None = None) -> Launch:
    tensors = _empty(dtype, "x out", rows, width) | _empty(dtype, "w b", width) | _empty("float32", "mean rstd", rows)
    return _rows(layer_norm_kernel, rows, width, {**tensors, "eps": 1e-5}, warps)


def rms_norm(dtype: str, rows: int, width: int) -> Launch:
    tensors = _empty(dtype, "x out", rows, width) | _empty(dtype, "w", width) | _empty("float32", "rstd", rows)
    return _rows(_rms_norm_kernel, rows, width, {**tensors, "eps": 1e-5})


def rms_norm_rows(dtype: str, rows: int, width: int) -> Launch:
    tensors = _empty(dtype, "x out", rows, width) | _empty(dtype, "w", width)
    arguments = {**tensors, "rows": rows, "eps": 1e-5, "ROWS": 16, "WIDTH": width}
    return _launch(_rms_norm_rows_kernel, (-(-rows // 16),), arguments, 4, 1)


def relu_squared(dtype: str, rows: int, width: int) -> Launch:
    return _rows(_relu_squared_kernel, rows, width, _empty(dtype, "x out", rows, width))


def swiglu(dtype: str, rows: int, width: int) -> Launch:
    return _rows(_swiglu_kernel, rows, width, _empty(dtype, "x", rows, 2 * width) | _empty(dtype, "out", rows, width))


def product(dtype: str, m: int, n: int, k: int) -> Launch:
    return _product(dtype, m, n, k, (128, 256, 64, 8, 3), n, 1)


def linear(dtype: str, m: int, n: int, k: int, *tile: int) -> Launch:
    """Return a product whose B lies as [N,K], as a linear layer's weight does."""
    return _product(dtype, m, n, k, tile, 1, k)


def _product(dtype: str, m: int, n: int, k: int, tile: tuple[int, ...], stride_bk: int, stride_bn: int) -> Launch:
    """tile: rows, columns, depth, warps, stages."""
    block_m, block_n, block_k, warps, stages = tile
    tensors = _empty(dtype, "a", m, k) | _empty(dtype, "b", k, n) | _empty(dtype, "c", m, n)
    arguments = {**tensors, "M": m, "N": n, "K": k, "stride_bk": stride_bk, "stride_bn": stride_bn}
    arguments |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8}
    return _launch(_product_kernel, (-(-m // block_m) * -(-n // block_n),), arguments, warps, stages)


def flash(dtype: str, heads: int, n: int, d: int, block_m: int, block_n: int, warps: int, stages: int) -> Launch:
    tensors = _empty(dtype, "q k v out", heads, n, d) | _empty("float32", "lse", heads, n)
    arguments = {**tensors, "N": n, "scale": 0.125, "D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return _launch(_flash_kernel, (n // block_m, heads), arguments, warps, stages)
