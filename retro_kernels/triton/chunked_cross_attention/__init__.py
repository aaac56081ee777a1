"""Chunked cross-attention, fused: the triton backend of `retro_kernels.chunked_cross_attention`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._problem import ChunkedCrossAttention
from ..._target import Target, current_target
from ...aot import Case
from .. import unsupported_rows, unsupported_tensors
from ..common.combinations import combinations
from . import cases, plan
from .backward_plan import Backward

_MAX_BATCH = 65535  # CUDA's limit on the second and third grid dimension


def unsupported(call: ChunkedCrossAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.query.shape[0] > _MAX_BATCH:
        return f"B={call.query.shape[0]} exceeds {_MAX_BATCH}"
    keys, mask, table = call.key.shape[3], call.neighbour_mask, call.rel_key
    spans = {
        "query": (call.query, 1, call.chunk_len), "key": (call.key, 3, keys), "value": (call.value, 3, keys),
        "rel_query": (call.rel_query, 1, call.chunk_len), "rel_key": (table, 1, 0 if table is None else table.shape[1]),
        "neighbour_mask": (mask if mask is not None and mask.dim() == 4 else None, 3, keys),
    }  # fmt: skip
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE}) or unsupported_rows(spans)


def forward(call: ChunkedCrossAttention) -> tuple[Tensor, Tensor]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32."""
    out, lse, launches = plan.forward(call, current_target(call.query.device))
    for launch in launches:
        launch.run()
    return out, lse


def backward(
    call: ChunkedCrossAttention, outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """One gradient per entry of DIFFERENTIABLE, None where not needed."""
    found = Backward(call, outputs, grads, needs, current_target(call.query.device))
    for launch in found.launches:
        launch.run()
    return found.gradients()


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `cases` launch it."""
    for name, (options, dtypes) in cases.CALLS.items():
        for dtype in dtypes:
            yield from _launches(name, cases.call(dtype, **options), target)


def aot_combinations(target: Target) -> Iterator[Case]:
    """The same with every set of options, in bfloat16."""
    for name, options in combinations(cases.POSITIONS, cases.OPTIONS):
        yield from _launches(name, cases.call(torch.bfloat16, **options), target)


def _launches(name: str, call: ChunkedCrossAttention, target: Target) -> Iterator[Case]:
    out, lse, launches = plan.forward(call, target)
    needs = tuple(getattr(call, field) is not None for field in call.DIFFERENTIABLE)
    launches += Backward(call, (out, lse), (out, None), needs, target).launches
    for launch in launches:
        yield Case(name, str(call.query.dtype).removeprefix("torch."), launch)
