"""Exact top-k by one scan over the keys: scores of a tile on the tensor cores, each row's list of k in registers.

A program holds BLOCK_Q queries and walks key tiles in ascending order. A tile's scores are masked where they stand and
compared with each row's k-th score; only a tile with a survivor costs more than that. Keys past the causal limit of the
tile's last query are never read. Where queries are too few to fill the device the keys are split, every split leaves
its k candidates, and a second kernel merges them.

Selection is exact and its order total: (higher score, lower index). The number of splits changes nothing, because a
candidate's score is one dot product, summed in one order, wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ....compile.aot import Case
from ....compile.target import Target
from ....triton_lib import unsupported_tensors
from ....triton_lib.plan import cases_of, run_backward, run_forward
from .. import cases
from ..call import TopkChunks
from . import launch
from .selection import MAX_KEYS

MAX_K = 128


def unsupported(call: TopkChunks) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.k > MAX_K:
        return f"k={call.k} exceeds {MAX_K}"
    if call.query.shape[1] + call.key.shape[1] > MAX_KEYS:
        return f"Q+S={call.query.shape[1] + call.key.shape[1]} exceeds {MAX_KEYS}"
    return unsupported_tensors({"query": call.query, "key": call.key})


def forward(call: TopkChunks) -> tuple[Tensor, ...]:
    """scores [B,Q,k] float32, indices [B,Q,k] int64."""
    return run_forward(launch.forward, call)


def backward(call: TopkChunks, outputs, grads, needs) -> list[Tensor | None]:
    """dquery and dkey from the chosen slots alone, without atomics; a slot of -1 gives nothing."""
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op, as the calls of `cases` launch it."""
    for name, _, call, gradients in cases.calls():
        yield from cases_of(name, call, target, launch.forward, launch.backward if gradients else None)
