"""Calls on the meta device that stand for what users launch: RETRO's presets and every option, for ahead-of-time compilation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._problem import ChunkedCrossAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def call(
    dtype: torch.dtype, *, B=8, N=2048, M=64, K=2, R=128, H=16, G=None, D=128, E=None, rel=True, biases=True, gate=False,
    mask_dims=0, dropout_p=0.0, query_start=0,
) -> ChunkedCrossAttention:  # fmt: skip
    """A validated call without memory behind it."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    chunks, groups, width = (query_start + N) // M, H if G is None else G, D if E is None else E
    return ChunkedCrossAttention(
        query=empty(B, N, H, D), key=empty(B, chunks, K, R, groups, D), value=empty(B, chunks, K, R, groups, D), chunk_len=M,
        rel_key=empty(H, M + R - 1, width) if rel else None, rel_query=empty(B, N, H, E) if rel and E else None, rel_start=1 - R,
        content_bias=empty(H, D) if biases else None, position_bias=empty(H, width) if biases and rel else None,
        neighbour_mask=empty(*(B, chunks, K, R)[:mask_dims], dtype=torch.bool) if mask_dims else None,
        neighbour_gate=empty(B, chunks, K) if gate else None, scale=D**-0.5, query_start=query_start, dropout_p=dropout_p,
        seed=empty(1, dtype=torch.int64) if dropout_p else None,
    )  # fmt: skip


#: the presets of RETRO (heads x head width); the head count is no constant of a kernel, so 12, 16 and 32 heads compile once
PRESETS = {"retro d64": dict(D=64), "retro d128": dict(D=128)}

CALLS = {
    **PRESETS,
    **{f"{name} gate mask": dict(options, gate=True, mask_dims=4) for name, options in PRESETS.items()},
    **{f"{name} decode": dict(options, N=1, query_start=2047, B=1) for name, options in PRESETS.items()},
    "no positions": dict(rel=False, biases=False),
    "neighbour mask": dict(mask_dims=3),
    "dropout": dict(dropout_p=0.1),
    "grouped heads": dict(G=4),
    "narrow relative": dict(E=16),
    "table": dict(E=1),
    "head of 24": dict(D=24),
    "head of 96": dict(D=96),
    "head of 256": dict(D=256),
    "long chunk": dict(M=256),
    "short chunk": dict(M=16, R=32),
}
