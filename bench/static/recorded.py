"""Triton launches that plug-ins register. A case's call is made on CPU tensors; its launches are kept and not executed.

They are compiled and counted like the shipped ones. A program that reads a kernel's result to decide its next launch
reads memory that nothing wrote.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from unittest import mock

from ..emulate import context
from ..measure import runner
from ..registry import CONTENDERS, LAUNCHES, cases_of
from . import fingerprint
from .entry import identity, selected


def launches(arch: int, parts: tuple[str, ...] | None) -> Iterator[tuple[str, str, str, str, object]]:
    """Yield (op, backend, case, dtype, launch) of every registered launch with one of `parts` in its id."""
    seen = collections.Counter()
    for op, backend, name, dtype, call in _calls():
        for launch in made(call, arch):
            case = f"{launch.name}:{name}:sm{arch}"
            seen[op, backend, case, dtype] += 1
            if (count := seen[op, backend, case, dtype]) > 1:
                case += f"#{count}"
            if selected(identity(op, backend, case, dtype), parts):
                yield op, backend, case, dtype, launch


def operators() -> set[str]:
    return {c.kernel for c in CONTENDERS.values() if c.triton} | {item.kernel for item in LAUNCHES}


def made(call: Callable[[], object], arch: int) -> list:
    """Return the launches of one call."""
    nothing = mock.patch.object(context, "execute", lambda *args, **kwargs: None)
    with nothing, context.gpu(arch, checks=False, counts=False) as log:
        call()
    return log.launches


def mark(launch, arch: int) -> str:
    """Return the fingerprint of a launch."""
    from retro_kernels.compile import aot
    from retro_kernels.compile.target import KNOWN

    return fingerprint.of_launch(*aot.source(launch, KNOWN[arch]))


def _calls() -> Iterator[tuple[str, str, str, str, Callable[[], object]]]:
    import torch

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
