"""Relative attention, fused: the triton backend of `retro_kernels.relative_attention`."""

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
from ..call import RelativeAttention
from . import launch

_MAX_BATCH = 65535  # CUDA's limit on the second and third grid dimension


def unsupported(call: RelativeAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.query.shape[0] > _MAX_BATCH:
        return f"B={call.query.shape[0]} exceeds {_MAX_BATCH}"
    n, s, table = call.query.shape[1], call.key.shape[1], call.rel_key
    spans = {
        "key": (call.key, 1, s),
        "value": (call.value, 1, s),
        "rel_key": (table, 1, 0 if table is None else table.shape[1]),
        "key_mask": (call.key_mask, 1, s),
        "query_segment": (call.query_segment, 1, n),
        "key_segment": (call.key_segment, 1, s),
    }
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE}) or unsupported_rows(spans)


def forward(call: RelativeAttention) -> tuple[Tensor, ...]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32."""
    return run_forward(launch.forward, call)


def backward(call: RelativeAttention, outputs, grads, needs) -> list[Tensor | None]:
    """Gradients in the order of `DIFFERENTIABLE`, bitwise repeatable: every program owns what it writes."""
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `cases` launch it."""
    for name, options in cases.CALLS.items():
        for dtype in cases.DTYPES:
            yield from _cases(name, cases.call(dtype, **options), target)


def aot_combinations(target: Target) -> Iterator[Case]:
    """Yield the launches of every set of options, in bfloat16."""
    for name, options in combinations(cases.POSITIONS, cases.OPTIONS):
        yield from _cases(name, cases.call(torch.bfloat16, **options), target)


def _cases(name: str, call: RelativeAttention, target: Target) -> Iterator[Case]:
    decodes = call.query.shape[1] == 1  # decoding takes no gradient
    return cases_of(name, call, target, launch.forward, None if decodes else launch.backward)
