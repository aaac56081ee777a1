"""Position logits alone, skewed by addresses: the triton backend of `retro_kernels.relative_logits`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....compile.aot import Case
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....triton_lib import unsupported_rows, unsupported_tensors
from ....triton_lib.plan import cases_of, run_backward, run_forward
from ..call import RelativeLogits
from . import launch

_MAX_GRID = 65535  # CUDA's limit on the second and third grid dimension


def unsupported(call: RelativeLogits) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if max(call.query.shape[0], call.query.shape[2]) > _MAX_GRID:
        return f"B={call.query.shape[0]} or H={call.query.shape[2]} exceeds {_MAX_GRID}"
    if call.key_len == 0:
        return "key_len is 0"
    rows = {"rel_key": (call.rel_key, 1, call.rel_key.shape[1])}
    return unsupported_tensors(
        {name: getattr(call, name) for name in RelativeLogits.DIFFERENTIABLE}
    ) or unsupported_rows(rows)


def forward(call: RelativeLogits) -> tuple[Tensor, ...]:
    """logits [B,H,N,key_len] in the query's type."""
    return run_forward(launch.forward, call)


def backward(call: RelativeLogits, outputs, grads, needs) -> list[Tensor | None]:
    """dq from one pass over the gradient, the table's from another;
    sums across programs are stored apart and then added in order.
    """
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, wide and narrow relative keys."""
    for name, (tables, e) in {"wide": (16, 128), "head": (16, 64), "narrow": (1, 16)}.items():
        for dtype in KERNEL_DTYPES:
            query = torch.empty((2, 2048, 16, e), dtype=dtype, device="meta")
            rel_key = torch.empty((tables, 4095, e), dtype=dtype, device="meta")
            call = RelativeLogits(query, rel_key, 2048, -2047, torch.empty((16, e), dtype=dtype, device="meta"), 0)
            yield from cases_of(name, call, target, launch.forward, launch.backward)
