"""Exact top-k by one scan over the keys: scores of a tile on the tensor cores, each row's list of k in registers.

A program holds BLOCK_Q queries and walks key tiles in ascending order. It masks a tile's scores in registers and
compares them with each row's k-th score. Only a tile with a higher score costs more. Keys past the causal limit of the
tile's last query are never read. Where too few queries fill the device, the keys are split: each split writes its k
candidates, and a second kernel merges them.

Selection is exact, and its order total: (higher score, lower index). The result does not depend on the number of
splits, because a candidate's score is a dot product that is always summed in the same order.

Gradients come from the chosen slots alone, without atomics; a slot of -1 adds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ....compile.aot import CompileCase
from ....compile.target import Target
from ....triton_lib import unsupported_tensors
from ....triton_lib.launch import cases_of, run_backward, run_forward
from .. import cases
from ..call import TopkChunks
from . import launch
from .selection import MAX_KEYS

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: TopkChunks) -> str | None:
    if call.query.shape[1] + call.key.shape[1] > MAX_KEYS:
        return f"Q+S={call.query.shape[1] + call.key.shape[1]} exceeds {MAX_KEYS}"
    return unsupported_tensors({"query": call.query, "key": call.key})


def aot_cases(target: Target) -> Iterator[CompileCase]:
    for name, call, gradients in cases.calls():
        yield from cases_of(name, call, target, launch.forward, launch.backward if gradients else None)
