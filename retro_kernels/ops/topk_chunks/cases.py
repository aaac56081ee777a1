"""Calls for compilation ahead of time: together they use every row of the tile table, every mask and both metrics."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...testing import inputs
from .call import TopkChunks

_MILLION = 10**6

#: name -> sizes and options
_CALLS = {
    # RPT: 256 chunks of one document; each looks for 4 of the chunks before it
    "RPT, B=8": dict(B=8, Q=256, S=256, k=4, causal=True),
    "RPT, B=32": dict(B=32, Q=256, S=256, k=4, causal=True),
    # RETRO: a few chunks against a database, L2, never of the same document
    "64 of a million": dict(Q=64, k=16),
    "64 of a million, RETRO": dict(Q=64, k=16, metric="l2", docs=True),
    "64 of a million, k=40": dict(Q=64, k=40, docs=True),
    "64 of a million, k=128": dict(Q=64, k=128),
    "1 of a million": dict(Q=1, k=10, mask=True),
    "1 of a million, k=40, L2": dict(Q=1, k=40, metric="l2", mask=True),
    "1 of a million, k=128, L2": dict(Q=1, k=128, metric="l2", mask=True, docs=True),
    "4096 of a million": dict(Q=4096, k=16),
    "4096 of a million, RETRO": dict(Q=4096, k=16, metric="l2", docs=True),
    "4096 of a million, k=40": dict(Q=4096, k=40, docs=True, mask=True),
    "4096 of a million, k=128": dict(Q=4096, k=128),
    "every mask": dict(Q=4096, k=10, causal=True, docs=True, mask=True),
    "every mask, L2": dict(B=4, Q=4096, S=50000, k=10, causal=True, docs=True, mask=True, metric="l2"),
    "width 1008": dict(Q=64, D=1008, k=10, docs=True),
    "width 100": dict(Q=256, S=100000, D=100, k=10, docs=True, mask=True, causal=True, metric="l2"),
}
#: calls whose gradients are taken, and calls in both half types and not in float32
_GRADIENTS = ("RPT, B=8", "64 of a million, RETRO", "width 100")
_HALVES = ("every mask", "every mask, L2")


def call(dtype: torch.dtype, *, B=1, S=_MILLION, D=1024, causal=False, **options) -> TopkChunks:
    """Return a call on the meta device. options: options of `inputs.topk`."""
    sizes = {"B": B, "S": S, "D": D, "causal_gap": 1 if causal else None, "query_offset": 7 if causal else 0}
    return inputs.shapes_of(TopkChunks, inputs.topk, dtype, **{"metric": "dot", **sizes, **options})


def calls() -> Iterator[tuple[str, TopkChunks, bool]]:
    """Yield (name, call, whether gradients are taken) for every case and type."""
    for name, options in _CALLS.items():
        for dtype in (torch.bfloat16, torch.float16 if name in _HALVES else torch.float32):
            yield name, call(dtype, **options), name in _GRADIENTS
