"""Calls on the meta device that stand for what users launch, for ahead-of-time compilation."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import RelativeAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def call(
    dtype: torch.dtype,
    *,
    B=8,
    N=2048,
    S=None,
    H=16,
    G=None,
    D=128,
    E=None,
    rel=True,
    T=None,
    shared=False,
    biases=True,
    causal=True,
    causal_gap=0,
    window=None,
    window_block=None,
    batch_offset=False,
    mask=False,
    segments=False,
    dropout_p=0.0,
) -> RelativeAttention:
    """A validated call without memory behind it. T: rows of a table from displacement 0 (None: every displacement)."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys, groups, width = N if S is None else S, H if G is None else G, D if E is None else E
    offset = keys - N if causal else 0
    rows, start = (N + keys - 1, offset - keys + 1) if T is None else (T, 0)
    return RelativeAttention(
        query=empty(B, N, H, D),
        key=empty(B, keys, groups, D),
        value=empty(B, keys, groups, D),
        rel_key=empty(1 if shared else H, rows, width) if rel else None,
        rel_query=empty(B, N, H, E) if rel and E else None,
        rel_start=start if rel else 0,
        content_bias=empty(H, D) if biases else None,
        position_bias=empty(H, width) if biases and rel else None,
        causal=causal,
        causal_gap=causal_gap,
        window=window,
        query_offset=offset,
        key_mask=empty(B, keys, dtype=torch.bool) if mask else None,
        query_segment=empty(B, N, dtype=torch.int64) if segments else None,
        key_segment=empty(B, keys, dtype=torch.int64) if segments else None,
        scale=D**-0.5,
        dropout_p=dropout_p,
        seed=empty(1, dtype=torch.int64) if dropout_p else None,
        window_block=window_block,
        batch_offset=empty(B, dtype=torch.int64) if batch_offset else None,
    )


CALLS = {
    "causal d64": dict(D=64),
    "causal d128": dict(D=128),
    "encoder d64": dict(D=64, N=128, causal=False, B=256),
    "decode d128": dict(D=128, N=1, S=4096, B=1),
    "plain d64": dict(D=64, rel=False, biases=False),
    "plain d128": dict(D=128, rel=False, biases=False),
    "extent 1024, e16": dict(D=128, E=16, T=1024, shared=True, biases=False),
    "extent 1024, e16, d64": dict(D=64, E=16, T=1024, shared=True, biases=False),
    "table": dict(D=64, E=1),
    "window": dict(D=128, window=512, T=512),
    "window, both directions": dict(D=128, causal=False, window=512, T=512),
    "window, both directions, table": dict(D=64, E=1, causal=False, window=512, T=512),
    "window of blocks": dict(D=64, N=4096, B=4, window_block=256, T=512),
    "window of blocks d128": dict(D=128, N=4096, B=4, window_block=256, T=512),
    "decode d64, own positions": dict(D=64, N=1, S=4096, T=4096, batch_offset=True),
    "decode d128, own positions": dict(D=128, N=1, S=4096, T=4096, batch_offset=True),
    "documents, masked": dict(D=64, mask=True, segments=True),
    "documents d128": dict(D=128, segments=True),
    "dropout d128": dict(D=128, dropout_p=0.1),
    "plain d64, documents, dropout": dict(D=64, rel=False, biases=False, segments=True, dropout_p=0.1),
    "plain d128, masked": dict(D=128, rel=False, biases=False, causal=False, mask=True),
    "plain d128, dropout": dict(D=128, rel=False, biases=False, dropout_p=0.1),
    "memory mosaic": dict(D=128, rel=False, biases=False, causal_gap=1),
    "grouped heads": dict(D=128, G=4),
    "dropout": dict(D=64, dropout_p=0.1),
    "head of 96": dict(D=96),
    "head of 256": dict(D=256),
}

#: forms of the positions, and what else costs registers, in every set of it: `common.combinations`
POSITIONS = {
    "E=D": {},
    "E=16": dict(E=16, T=1024, shared=True, biases=False),
    "E=1": dict(E=1),
    "none": dict(rel=False, biases=False),
}
OPTIONS = {
    "both directions": dict(causal=False),
    "window": dict(window=512, T=512),
    "mask": dict(mask=True),
    "documents": dict(segments=True),
    "dropout": dict(dropout_p=0.1),
}
