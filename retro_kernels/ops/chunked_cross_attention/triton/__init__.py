"""The triton backend of `chunked_cross_attention`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ....compile.aot import CompileCase
from ....compile.target import Target
from ....triton_lib import unsupported_grid, unsupported_rows, unsupported_tensors
from ....triton_lib.combinations import combinations
from ....triton_lib.launch import cases_of, run_backward, run_forward
from .. import cases
from ..call import ChunkedCrossAttention
from . import launch

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: ChunkedCrossAttention) -> str | None:
    keys, mask, table = call.key.shape[3], call.neighbour_mask, call.rel_key
    spans = {
        "query": (call.query, 1, call.chunk_len),
        "key": (call.key, 3, keys),
        "value": (call.value, 3, keys),
        "rel_query": (call.rel_query, 1, call.chunk_len),
        "rel_key": (table, 1, 0 if table is None else table.shape[1]),
        "neighbour_mask": (mask if mask is not None and mask.dim() == 4 else None, 3, keys),
    }
    tensors = {name: getattr(call, name) for name in call.DIFFERENTIABLE}
    return unsupported_grid(B=call.query.shape[0]) or unsupported_tensors(tensors) or unsupported_rows(spans)


def aot_cases(target: Target) -> Iterator[CompileCase]:
    for name, (options, dtypes) in cases.CALLS.items():
        for dtype in dtypes:
            yield from cases_of(name, cases.call(dtype, **options), target, launch.forward, launch.backward)


def aot_combinations(target: Target) -> Iterator[CompileCase]:
    """Yield the launches of every set of options, in bfloat16."""
    for name, options in combinations(cases.POSITIONS, cases.OPTIONS):
        yield from cases_of(name, cases.call(torch.bfloat16, **options), target, launch.forward, launch.backward)
