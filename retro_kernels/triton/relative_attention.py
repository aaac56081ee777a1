"""Relative attention, fused: the triton backend of `retro_kernels.relative_attention`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .._problem import RelativeAttention
from .._target import Target, current_target
from ..aot import Case
from . import _relative_cases, _relative_plan, unsupported

_MAX_BATCH = 65535  # CUDA's limit on the second and third grid dimension


def reason(call: RelativeAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.query.shape[0] > _MAX_BATCH:
        return f"B={call.query.shape[0]} exceeds {_MAX_BATCH}"
    return unsupported({name: getattr(call, name) for name in RelativeAttention.DIFFERENTIABLE})


def forward(call: RelativeAttention) -> tuple[Tensor, Tensor]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32."""
    out, lse, launches = _relative_plan.forward(call, current_target(call.query.device))
    for each in launches:
        each.run()
    return out, lse


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `_relative_cases` launch it."""
    for name, options in _relative_cases.CALLS.items():
        for dtype in _relative_cases.DTYPES:
            call = _relative_cases.call(dtype, **options)
            for each in _relative_plan.forward(call, target)[-1]:
                yield Case(name, str(dtype).removeprefix("torch."), each)
