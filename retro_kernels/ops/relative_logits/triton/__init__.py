"""The triton backend of `relative_logits`.

One pass over the gradient makes dq, another pass makes the gradient of the table. Sums of several programs are stored
separately and added in order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ....compile.aot import CompileCase
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....testing import inputs
from ....triton_lib import unsupported_grid, unsupported_rows, unsupported_tensors
from ....triton_lib.launch import cases_of, run_backward, run_forward
from ..call import RelativeLogits
from . import launch

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: RelativeLogits) -> str | None:
    if call.key_len == 0:
        return "key_len is 0"
    return (
        unsupported_grid(B=call.query.shape[0], H=call.query.shape[2])
        or unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE})
        or unsupported_rows({"rel_key": (call.rel_key, 1, call.rel_key.shape[1])})
    )


def aot_cases(target: Target) -> Iterator[CompileCase]:
    """Yield every kernel, with wide and narrow relative keys."""
    sizes = {"N": 2048, "H": 16, "key_len": 2048, "query_offset": 0}
    for name, heads, e in (("wide", "each", 128), ("head", "each", 64), ("narrow", "shared", 16)):
        for dtype in KERNEL_DTYPES:
            call = inputs.shapes_of(RelativeLogits, inputs.relative_logits, dtype, **sizes, heads=heads, E=e)
            yield from cases_of(name, call, target, launch.forward, launch.backward)
