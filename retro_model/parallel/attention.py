"""Causal relative attention over sequences that are divided among processes."""

from __future__ import annotations

import torch
from torch import Tensor

import retro_kernels as rk

from .collectives import GatherAll, Line

KEYS = "keys and values"


def gathered_attention(
    line: Line, query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, segment: Tensor | None = None, **options
) -> Tensor:
    """Return this process's rows of `rk.relative_attention(..., causal=True)` over the whole sequence.

    Args:
        line: the processes, in the order of their ranges of n tokens.
        query, key, value: of this process's range, [B,n,H,D] and [B,n,G,D].
        rel_key: [H,(rank+1)*n,D], row t for displacement t.
        segment: integers [B,n], for packed documents: a token attends its own segment; None: a single document.
        options: content_bias, position_bias, dropout_p, backend.

    Returns: [B,n,H,D].
    """
    seen = (line.rank + 1) * query.shape[1]
    both = GatherAll.apply(line, KEYS, torch.stack([key, value]))  # [size,2,B,n,G,D]
    key, value = both[: line.rank + 1].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    if segment is not None:
        every = line.gather("segments", segment)[: line.rank + 1].transpose(0, 1).flatten(1)
        options |= {"query_segment": segment, "key_segment": every}
    return rk.relative_attention(
        query, key, value, rel_key=rel_key, rel_start=0, causal=True, query_offset=seen - query.shape[1], **options
    )
