"""The triton backend of `leaky_average`, a scan over time. dx is the same scan run backwards over dy; d decay sums
dx_t * y_{t-1} over the saved y, in two stages of fixed order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from ....compile.aot import CompileCase
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....testing import inputs
from ....triton_lib import unsupported_grid, unsupported_tensors
from ....triton_lib.launch import cases_of, run_backward, run_forward
from ..call import LeakyAverage
from . import launch

forward = functools.partial(run_forward, launch.forward)
backward = functools.partial(run_backward, launch.backward)


def unsupported(call: LeakyAverage) -> str | None:
    # decay may be float32 if x has a half type
    why = unsupported_tensors({"x": call.x, "initial": call.initial}) or unsupported_tensors({"decay": call.decay})
    return unsupported_grid(B=call.x.shape[0]) or why


def aot_cases(target: Target) -> Iterator[CompileCase]:
    """Yield every kernel: of a call whose columns fill the device, and of a call that needs chunks of time."""
    for name, (b, n, h, d) in {"wide": (16, 2048, 16, 64), "long": (1, 16384, 8, 128)}.items():
        for documents, dtype in itertools.product((False, True), KERNEL_DTYPES):
            call = inputs.shapes_of(LeakyAverage, inputs.leaky, dtype, B=b, N=n, H=h, D=d, segments=int(documents))
            call = call._replace(decay=call.decay.float())
            case = f"{name}, documents" if documents else name
            yield from cases_of(case, call, target, launch.forward, launch.backward)
