"""Typical calls on the meta device, for compilation ahead of time: RETRO's presets and every option."""

from __future__ import annotations

import torch

from ...testing import inputs
from .call import ChunkedCrossAttention

PRESET = {"B": 8, "N": 2048, "M": 64, "K": 2, "R": 128, "H": 16, "D": 128}


def call(dtype: torch.dtype, *, batch_start=False, **options) -> ChunkedCrossAttention:
    """Return a checked call on the meta device. options: for `inputs.cross_attention`; default: the preset."""
    made = inputs.shapes_of(ChunkedCrossAttention, inputs.cross_attention, dtype, **PRESET | options)
    positions = torch.empty(len(made.query), dtype=torch.int64, device="meta")
    return made._replace(batch_start=positions) if batch_start else made


BF16, ALL = (torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32)

#: RETRO's presets by head width; kernels do not depend on the number of heads
PRESETS: dict[str, dict] = {"retro d64": {"D": 64}, "retro d128": {"D": 128}}

#: name -> (options of `call`, types); float16's code differs from bfloat16's only in the types of instructions, so
#: few calls are compiled in float16
CALLS: dict[str, tuple[dict, tuple[torch.dtype, ...]]] = {
    **{name: (options, ALL) for name, options in PRESETS.items()},
    **{f"{name} gate mask": ({**options, "gate": True, "mask": "token"}, ALL) for name, options in PRESETS.items()},
    **{f"{name} dropout": ({**options, "dropout_p": 0.1}, ALL) for name, options in PRESETS.items()},
    **{f"{name} decode": ({**options, "N": 1, "query_start": 2047, "B": 1}, BF16) for name, options in PRESETS.items()},
    **{
        f"{name} decode, own positions": ({**options, "N": 1, "query_start": 2047, "batch_start": True}, BF16)
        for name, options in PRESETS.items()
    },
    **{f"{name} four neighbours": ({**options, "K": 4}, BF16) for name, options in PRESETS.items()},
    "retro d64 masked": ({"D": 64, "mask": "neighbour"}, ALL),
    "rpt gate": ({"rel": None, "biases": False, "gate": True}, ALL),
    "no positions": ({"rel": None, "biases": False}, BF16),
    "neighbour mask": ({"mask": "neighbour"}, BF16),
    "grouped heads": ({"G": 4}, ALL),
    "narrow relative": ({"E": 16}, BF16),
    "head of 24": ({"D": 24}, BF16),
    "head of 96": ({"D": 96}, BF16),
    "head of 256": ({"D": 256}, (torch.bfloat16, torch.float32)),
    "long chunk": ({"M": 256}, BF16),
    "short chunk": ({"M": 16, "R": 32}, BF16),
}

#: forms of the positions, and options that cost registers, for `triton_lib.combinations`
POSITIONS = {"E=D": {}, "E=16": dict(E=16, biases=False), "E=1": dict(E=1), "none": dict(rel=None, biases=False)}
OPTIONS = {
    "mask": dict(mask="token"),
    "gate": dict(gate=True),
    "grouped heads": dict(G=4),
    "dropout": dict(dropout_p=0.1),
    "four neighbours": dict(K=4),
}
