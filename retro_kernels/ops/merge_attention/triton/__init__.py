"""The triton backend of `merge_attention`. Both gradients come from one kernel, which reads each part twice."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ....compile.aot import CompileCase
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....testing import inputs
from ....triton_lib import unsupported_grid, unsupported_tensors
from ....triton_lib.launch import cases_of, run_backward, run_forward
from ..call import MergeAttention
from . import launch

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: MergeAttention) -> str | None:
    return unsupported_grid(B=call.outs.shape[1]) or unsupported_tensors({"outs": call.outs})


def aot_cases(target: Target) -> Iterator[CompileCase]:
    """Yield every kernel with the presets' head widths: two parts, and a decode step over many."""
    sizes = {"two parts d64": (2, 8, 2048, 64), "two parts d128": (2, 8, 2048, 128), "decode d128": (16, 8, 1, 128)}
    for name, (p, b, n, d) in sizes.items():
        for dtype in KERNEL_DTYPES:
            call = inputs.shapes_of(MergeAttention, inputs.merged, dtype, P=p, B=b, N=n, H=16, D=d)
            yield from cases_of(name, call, target, launch.forward, launch.backward)
