"""Triton launches that plug-ins register. A case's call is made on CPU tensors; its launches are kept and not executed.

They are compiled and counted like the shipped ones. A program that reads a kernel's result to decide its next launch
reads memory that nothing wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch

from ..emulate import context
from ..measure import runner
from ..registry import CONTENDERS, LAUNCHES, cases_of


def launches(arch: int) -> Iterator[tuple[str, str, str, str, object]]:
    """Yield (op, backend, case, dtype, launch) of every registered launch."""
    for op, backend, name, dtype, call in _calls():
        nothing = mock.patch.object(context, "execute", lambda *args, **kwargs: None)
        with nothing, context.gpu(arch, checks=False, counts=False) as log:
            call()
        for launch in log.launches:
            yield op, backend, f"{launch.name}:{name}:sm{arch}", dtype, launch


def _calls() -> Iterator[tuple[str, str, str, str, Callable[[], object]]]:
    for item in LAUNCHES:
        yield item.kernel, "triton", item.name, item.dtype, item.call
    for contender in CONTENDERS.values():
        for case in cases_of(contender.kernel) if contender.triton else ():
            for dtype in case.dtypes.get("cuda", ()):
                arguments = case.make(0, "cpu", getattr(torch, dtype))
                for mode in case.modes:
                    if not contender.reason(case, dtype, "cuda"):
                        call = runner.step(contender, case, arguments, mode == "fwdbwd", 0)
                        yield case.kernel, contender.name, f"{case.name} {mode}", dtype, call
