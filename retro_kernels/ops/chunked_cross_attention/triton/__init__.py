"""Chunked cross-attention, fused: the triton backend of `retro_kernels.chunked_cross_attention`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....compile.aot import Case
from ....compile.target import Target
from ....triton_lib import unsupported_rows, unsupported_tensors
from ....triton_lib.combinations import combinations
from ....triton_lib.plan import cases_of, run_backward, run_forward
from .. import cases
from ..call import ChunkedCrossAttention
from . import launch

_MAX_BATCH = 65535  # CUDA's limit on the second and third grid dimension


def unsupported(call: ChunkedCrossAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.query.shape[0] > _MAX_BATCH:
        return f"B={call.query.shape[0]} exceeds {_MAX_BATCH}"
    keys, mask, table = call.key.shape[3], call.neighbour_mask, call.rel_key
    spans = {
        "query": (call.query, 1, call.chunk_len),
        "key": (call.key, 3, keys),
        "value": (call.value, 3, keys),
        "rel_query": (call.rel_query, 1, call.chunk_len),
        "rel_key": (table, 1, 0 if table is None else table.shape[1]),
        "neighbour_mask": (mask if mask is not None and mask.dim() == 4 else None, 3, keys),
    }
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE}) or unsupported_rows(spans)


def forward(call: ChunkedCrossAttention) -> tuple[Tensor, ...]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32."""
    return run_forward(launch.forward, call)


def backward(call: ChunkedCrossAttention, outputs, grads, needs) -> list[Tensor | None]:
    """One gradient per entry of DIFFERENTIABLE, None where not needed."""
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `cases` launch it."""
    for name, (options, dtypes) in cases.CALLS.items():
        for dtype in dtypes:
            yield from cases_of(name, cases.call(dtype, **options), target, launch.forward, launch.backward)


def aot_combinations(target: Target) -> Iterator[Case]:
    """Yield the launches of every set of options, in bfloat16."""
    for name, options in combinations(cases.POSITIONS, cases.OPTIONS):
        yield from cases_of(name, cases.call(torch.bfloat16, **options), target, launch.forward, launch.backward)
