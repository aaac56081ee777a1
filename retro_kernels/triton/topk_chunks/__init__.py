"""Exact top-k by one scan over the keys: scores of a tile on the tensor cores, each row's list of k in registers.

A program holds BLOCK_Q queries and walks key tiles in ascending order. A tile's scores are masked where they stand and
compared with each row's k-th score; only a tile with a survivor costs more than that. Keys past the causal limit of the
tile's last query are never read. Where queries are too few to fill the device the keys are split, every split leaves its
k candidates, and a second kernel merges them.

Selection is exact and its order total: (higher score, lower index). The number of splits changes nothing, because a
candidate's score is one dot product, summed in one order, wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._problem import TopkChunks
from ..._target import Target, current_target
from ...aot import Case
from .. import unsupported_tensors
from . import cases, plan
from .selection import MAX_KEYS

MAX_K = 128


def unsupported(call: TopkChunks) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.k > MAX_K:
        return f"k={call.k} exceeds {MAX_K}"
    if call.query.shape[1] + call.key.shape[1] > MAX_KEYS:
        return f"Q+S={call.query.shape[1] + call.key.shape[1]} exceeds {MAX_KEYS}"
    return unsupported_tensors({"query": call.query, "key": call.key})


def forward(call: TopkChunks) -> tuple[Tensor, Tensor]:
    """scores [B,Q,k] float32, indices [B,Q,k] int64."""
    scores, indices, launches = plan.forward(call, current_target(call.query.device))
    for launch in launches:
        launch.run()
    return scores, indices


def backward(call: TopkChunks, outputs, grads, needs) -> list[Tensor | None]:
    """dquery and dkey from the chosen slots alone, without atomics; a slot of -1 gives nothing."""
    found: list[Tensor | None] = [None, None]
    if grads[0] is None:
        return [torch.zeros_like(t) if needed else None for t, needed in zip((call.query, call.key), needs, strict=True)]
    indices, grad = outputs[1].contiguous(), grads[0].float().contiguous()
    for i, gradient in enumerate((plan.dquery, plan.dkey)):
        if needs[i]:
            found[i], launches = gradient(call, indices, grad)
            for launch in launches:
                launch.run()
    return found


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `cases` launch it."""
    for name, dtype, call, gradients in cases.calls():
        scores, indices, launches = plan.forward(call, target)
        if gradients:
            for gradient in (plan.dquery, plan.dkey):
                launches += gradient(call, indices, scores)[1]
        for launch in launches:
            yield Case(name, dtype, launch)
