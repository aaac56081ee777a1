"""What the kernels are compared with: independent formulations of each op, written without looking at its reference.

One table per op, and `contenders()` of all of them. Each is checked against the float64 reference before it is timed; one that
fails is reported and not used. `eager` is also the accuracy yardstick: plain PyTorch with every product and softmax in the case's type.
"""

from __future__ import annotations

from ..registry import Contender
from . import chunked_cross_attention, leaky_average, relative_attention, relative_logits, topk_chunks


def contenders() -> list[Contender]:
    tables = (chunked_cross_attention, relative_attention, relative_logits, topk_chunks, leaky_average)
    return [contender for table in tables for contender in table.BASELINES]
