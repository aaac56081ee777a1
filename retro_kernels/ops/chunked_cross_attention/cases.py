"""Calls on the meta device that stand for what users launch: RETRO's
presets and every option, for ahead-of-time compilation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import ChunkedCrossAttention


def call(
    dtype: torch.dtype,
    *,
    B=8,
    N=2048,
    M=64,
    K=2,
    R=128,
    H=16,
    G=None,
    D=128,
    E=None,
    rel=True,
    biases=True,
    gate=False,
    mask_dims=0,
    dropout_p=0.0,
    query_start=0,
    batch_start=False,
) -> ChunkedCrossAttention:
    """A validated call without memory behind it."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    chunks, groups, width = (query_start + N) // M, H if G is None else G, D if E is None else E
    return ChunkedCrossAttention(
        query=empty(B, N, H, D),
        key=empty(B, chunks, K, R, groups, D),
        value=empty(B, chunks, K, R, groups, D),
        chunk_len=M,
        rel_key=empty(H, M + R - 1, width) if rel else None,
        rel_query=empty(B, N, H, E) if rel and E else None,
        rel_start=1 - R,
        content_bias=empty(H, D) if biases else None,
        position_bias=empty(H, width) if biases and rel else None,
        neighbour_mask=empty(*(B, chunks, K, R)[:mask_dims], dtype=torch.bool) if mask_dims else None,
        neighbour_gate=empty(B, chunks, K) if gate else None,
        scale=D**-0.5,
        query_start=query_start,
        dropout_p=dropout_p,
        seed=empty(1, dtype=torch.int64) if dropout_p else None,
        batch_start=empty(B, dtype=torch.int64) if batch_start else None,
    )


BF16, HALVES, ALL = (torch.bfloat16,), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)

#: the presets of RETRO (heads x head width); the head count is no
#: constant of a kernel, so 12, 16 and 32 heads compile once
PRESETS: dict[str, dict] = {"retro d64": {"D": 64}, "retro d128": {"D": 128}}

#: name -> (options of `call`, types). float16 compiles to bfloat16's
#: code but for the instruction's type: the presets stand for it
CALLS: dict[str, tuple[dict, tuple[torch.dtype, ...]]] = {
    **{name: (options, ALL) for name, options in PRESETS.items()},
    **{f"{name} gate mask": ({**options, "gate": True, "mask_dims": 4}, ALL) for name, options in PRESETS.items()},
    **{f"{name} dropout": ({**options, "dropout_p": 0.1}, ALL) for name, options in PRESETS.items()},
    **{f"{name} decode": ({**options, "N": 1, "query_start": 2047, "B": 1}, BF16) for name, options in PRESETS.items()},
    **{
        f"{name} decode, own positions": ({**options, "N": 1, "query_start": 2047, "batch_start": True}, BF16)
        for name, options in PRESETS.items()
    },
    "retro d64 masked": ({"D": 64, "mask_dims": 3}, ALL),
    "rpt gate": ({"rel": False, "biases": False, "gate": True}, ALL),
    "no positions": ({"rel": False, "biases": False}, BF16),
    "neighbour mask": ({"mask_dims": 3}, BF16),
    "grouped heads": ({"G": 4}, ALL),
    "narrow relative": ({"E": 16}, BF16),
    "head of 24": ({"D": 24}, BF16),
    "head of 96": ({"D": 96}, BF16),
    "head of 256": ({"D": 256}, (torch.bfloat16, torch.float32)),
    "long chunk": ({"M": 256}, BF16),
    "short chunk": ({"M": 16, "R": 32}, BF16),
}

#: forms of the positions, and what else costs registers, in every set of it: `common.combinations`
POSITIONS = {"E=D": {}, "E=16": dict(E=16, biases=False), "E=1": dict(E=1), "none": dict(rel=False, biases=False)}
OPTIONS = {
    "mask": dict(mask_dims=4),
    "gate": dict(gate=True),
    "grouped heads": dict(G=4),
    "dropout": dict(dropout_p=0.1),
}
