"""Compile the launches of a selection ahead of time, in one process per core."""

import contextlib

from ..registry import CONTENDERS
from . import choose, runner
from .pace import Pace


def compile_selection(selection: choose.Selection, limit: float | None = None) -> int:
    """Return how many kernels are compiled now. `limit` seconds may leave some out. A kernel that does not compile
    fails again in its call, which reports it.
    """
    import torch

    import retro_kernels as rk

    pace = Pace([], limit)

    def planned(case, dtype: str, mode: str) -> None:
        """Make one call, whose launches `warm_up` replaces. Its inputs are freed at once."""
        if pace.over():
            return
        with contextlib.suppress(RuntimeError, ValueError):
            inputs = case.make(0, selection.device, getattr(torch, dtype))
            runner.step(CONTENDERS[case.op, "triton"], case, inputs, mode == "fwdbwd", 0)()

    calls = [
        lambda case=case, dtype=dtype, mode=mode: planned(case, dtype, mode)
        for case in choose.cases(selection)
        if (case.op, "triton") in CONTENDERS and choose.unsupported_case(case, selection.device) is None
        for dtype in choose.dtypes(case, selection)
        if not choose.unsupported(CONTENDERS[case.op, "triton"], case, dtype, selection.device, False)
        for mode in choose.modes(case, selection)
    ]
    try:
        return rk.warm_up(*calls) if calls else 0
    except RuntimeError:  # the other kernels are compiled
        return 0
