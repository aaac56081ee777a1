"""The triton backend of `relative_attention`. Gradients are bitwise repeatable: one program writes each element."""

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
from ..call import RelativeAttention
from . import launch

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: RelativeAttention) -> str | None:
    n, s, table = call.query.shape[1], call.key.shape[1], call.rel_key
    spans = {
        "key": (call.key, 1, s),
        "value": (call.value, 1, s),
        "rel_key": (table, 1, 0 if table is None else table.shape[1]),
        "key_mask": (call.key_mask, 1, s),
        "query_segment": (call.query_segment, 1, n),
        "key_segment": (call.key_segment, 1, s),
    }
    tensors = {name: getattr(call, name) for name in call.DIFFERENTIABLE}
    return unsupported_grid(B=call.query.shape[0]) or unsupported_tensors(tensors) or unsupported_rows(spans)


def aot_cases(target: Target) -> Iterator[CompileCase]:
    for name, options in cases.CALLS.items():
        for dtype in cases.DTYPES:
            yield from _cases(name, cases.call(dtype, **options), target)


def aot_combinations(target: Target) -> Iterator[CompileCase]:
    """Yield the launches of every set of options, in bfloat16."""
    for name, options in combinations(cases.POSITIONS, cases.OPTIONS):
        yield from _cases(name, cases.call(torch.bfloat16, **options), target)


def _cases(name: str, call: RelativeAttention, target: Target) -> Iterator[CompileCase]:
    decodes = call.query.shape[1] == 1  # decoding takes no gradient
    return cases_of(name, call, target, launch.forward, None if decodes else launch.backward)
