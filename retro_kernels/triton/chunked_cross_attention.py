"""Chunked cross-attention, fused: the triton backend of `retro_kernels.chunked_cross_attention`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._problem import ChunkedCrossAttention
from .._target import Target, current_target
from ..aot import Case
from . import _cca_cases, _cca_plan, unsupported
from ._cca_backward_plan import Backward
from ._combinations import combinations

_MAX_BATCH = 65535  # CUDA's limit on the second and third grid dimension


def reason(call: ChunkedCrossAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    names = ("query", "key", "value", "rel_key", "rel_query", "content_bias", "position_bias", "neighbour_gate")
    if call.query.shape[0] > _MAX_BATCH:
        return f"B={call.query.shape[0]} exceeds {_MAX_BATCH}"
    return unsupported({name: getattr(call, name) for name in names})


def forward(call: ChunkedCrossAttention) -> tuple[Tensor, Tensor]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32."""
    out, lse, launches = _cca_plan.forward(call, current_target(call.query.device))
    for launch in launches:
        launch.run()
    return out, lse


def backward(
    call: ChunkedCrossAttention, outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """One gradient per entry of DIFFERENTIABLE, None where not needed."""
    plan = Backward(call, outputs, grads, needs, current_target(call.query.device))
    for launch in plan.launches:
        launch.run()
    return plan.gradients()


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `_cca_cases` launch it."""
    for name, (options, dtypes) in _cca_cases.CALLS.items():
        for dtype in dtypes:
            yield from _launches(name, _cca_cases.call(dtype, **options), target)


def aot_combinations(target: Target) -> Iterator[Case]:
    """The same with every set of options, in bfloat16."""
    for name, options in combinations(_cca_cases.POSITIONS, _cca_cases.OPTIONS):
        yield from _launches(name, _cca_cases.call(torch.bfloat16, **options), target)


def _launches(name: str, call: ChunkedCrossAttention, target: Target) -> Iterator[Case]:
    out, lse, launches = _cca_plan.forward(call, target)
    needs = tuple(getattr(call, field) is not None for field in call.DIFFERENTIABLE)
    launches += Backward(call, (out, lse), (out, lse), needs, target).launches
    for launch in launches:
        yield Case(name, str(call.query.dtype).removeprefix("torch."), launch)
