"""Typical calls on the meta device, for compilation ahead of time."""

from __future__ import annotations

import torch

from ...testing import inputs
from .call import RelativeAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRESET = {"B": 8, "N": 2048, "H": 16, "D": 128, "causal": True, "causal_gap": 0, "dropout_p": 0.0}


def call(dtype: torch.dtype, *, batch_offset=False, **options) -> RelativeAttention:
    """Return a checked call on the meta device. options: for `inputs.self_attention`; default: the preset. T:
    rows of a table from displacement 0 (None: every displacement).
    """
    if "T" in options:
        options = {"rel": "bounded", "rel_start": 0} | options
    made = inputs.shapes_of(RelativeAttention, inputs.self_attention, dtype, **PRESET | options)
    positions = torch.empty(len(made.query), dtype=torch.int64, device="meta")
    return made._replace(batch_offset=positions) if batch_offset else made


CALLS = {
    "causal d64": dict(D=64),
    "causal d128": dict(D=128),
    "encoder d64": dict(D=64, N=128, causal=False, B=256),
    "decode d128": dict(D=128, N=1, S=4096, B=1),
    "plain d64": dict(D=64, rel=None, biases=False),
    "plain d128": dict(D=128, rel=None, biases=False),
    "extent 1024, e16": dict(D=128, E=16, T=1024, heads="shared", biases=False),
    "extent 1024, e16, d64": dict(D=64, E=16, T=1024, heads="shared", biases=False),
    "own relative query": dict(D=64, E=64),
    "table": dict(D=64, E=1),
    "window": dict(D=128, window=512, T=512),
    "window, both directions": dict(D=128, causal=False, window=512, T=512),
    "window, both directions, table": dict(D=64, E=1, causal=False, window=512, T=512),
    "window of blocks": dict(D=64, N=4096, B=4, window_block=256, T=512),
    "window of blocks d128": dict(D=128, N=4096, B=4, window_block=256, T=512),
    "decode d64, own positions": dict(D=64, N=1, S=4096, T=4096, batch_offset=True),
    "decode d128, own positions": dict(D=128, N=1, S=4096, T=4096, batch_offset=True),
    "documents, masked": dict(D=64, key_mask=True, segments=True),
    "documents d128": dict(D=128, segments=True),
    "dropout d128": dict(D=128, dropout_p=0.1),
    "plain d64, documents, dropout": dict(D=64, rel=None, biases=False, segments=True, dropout_p=0.1),
    "plain d128, masked": dict(D=128, rel=None, biases=False, causal=False, key_mask=True),
    "plain d128, dropout": dict(D=128, rel=None, biases=False, dropout_p=0.1),
    "memory mosaic": dict(D=128, rel=None, biases=False, causal_gap=1),
    "grouped heads": dict(D=128, G=4),
    "dropout": dict(D=64, dropout_p=0.1),
    "head of 96": dict(D=96),
    "head of 256": dict(D=256),
}

#: forms of the positions, and options that cost registers, for `triton_lib.combinations`
POSITIONS = {
    "E=D": {},
    "E=16": dict(E=16, T=1024, heads="shared", biases=False),
    "E=1": dict(E=1),
    "none": dict(rel=None, biases=False),
}
OPTIONS = {
    "both directions": dict(causal=False),
    "window": dict(window=512, T=512),
    "mask": dict(key_mask=True),
    "documents": dict(segments=True),
    "dropout": dict(dropout_p=0.1),
}
