"""Static metrics of the Triton kernels, by `retro_kernels.compile.aot` of the imported tree."""

from __future__ import annotations

import collections
import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import ops
from ..registry import OPERATORS
from . import entry, fingerprint, recorded, sass, tiles


@dataclass(frozen=True)
class Launch:
    """One compile in the order of `aot.compile_each`. The second and third launch of a kernel in one case get #2 and
    #3.
    """

    op: str
    case: str
    dtype: str
    arch: int
    wanted: bool
    fingerprint: str | None  # None: not wanted
    launch: Any  # of the tree that was imported
    backend: str = "triton"
    recorded: bool = False  # of a plug-in: made by a call and not by `aot`

    @property
    def id(self) -> str:
        return entry.identity(self.op, self.backend, self.case, self.dtype)


def launches(arches: list[int], parts: tuple[str, ...] | None) -> list[Launch]:
    """Return every launch that aot compiles or a plug-in registered. Those that `parts` select have a fingerprint."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("retro_kernels.compile.aot") is None:
        raise entry.NoToolchain("static: needs triton and retro_kernels.compile.aot; pip install triton")
    from retro_kernels.compile import aot
    from retro_kernels.compile.target import KNOWN

    every, seen = [], collections.Counter()
    foreign = recorded.operators()
    theirs = OPERATORS.keys() - set(ops.NAMES)
    shipped = parts is None or any(part.partition("/")[0] not in theirs for part in parts)
    for arch in arches:
        for op, backend, name, dtype, launch in recorded.launches(arch, parts) if foreign else ():
            mark = recorded.mark(launch, arch)
            every.append(Launch(op, name, dtype, arch, True, mark, launch, backend, recorded=True))
        for op, case in aot.cases(KNOWN[arch]) if shipped else ():
            name = f"{case.launch.name}:{case.case}:sm{arch}"
            seen[op, name, case.dtype] += 1
            if (count := seen[op, name, case.dtype]) > 1:
                name += f"#{count}"
            wanted = entry.selected(entry.identity(op, "triton", name, case.dtype), parts)
            mark = fingerprint.of_launch(*aot.source(case.launch, KNOWN[arch])) if wanted else None
            every.append(Launch(op, name, case.dtype, arch, wanted, mark, case.launch))
    return every


def rows(
    arches: list[int],
    selected: list[Launch],
    every: list[Launch],
    folder: Path,
    jobs: int | None,
    counters: bool = False,
) -> Iterator[dict[str, Any]]:
    """Compile the `selected` of `every` and read their machine code. Yield the rows in order, each as soon as it is
    done.

    counters: also execute one CTA of each on the emulator.
    """
    from retro_kernels.compile import aot

    ids = {launch.id for launch in selected}
    for launch in every:
        if launch.recorded and launch.id in ids:
            metrics = tiles.static_record(launch.launch, launch.arch)
            counted = _emulated(launch) if counters else {}
            yield entry.row(launch.op, launch.backend, launch.case, launch.dtype, metrics | counted)
    every = [launch for launch in every if not launch.recorded]
    if not any(launch.id in ids for launch in every):
        return
    flags = iter([launch.id in ids for launch in every])  # compile_each asks in the order in which `launches` listed
    compiled = aot.compile_each(arches, None, folder, jobs, select=lambda op, case: next(flags))
    wanted = [launch for launch in every if launch.id in ids]
    reading: collections.deque[Future] = collections.deque()
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:  # each waits for a disassembler of its own
        for launch, result in zip(wanted, compiled, strict=True):
            reading.append(pool.submit(_row, launch, result, folder, counters))
            while reading and reading[0].done():
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _row(launch: Launch, compiled, folder: Path, counters: bool) -> dict[str, Any]:
    from retro_kernels.compile import aot

    cubin = next(folder.glob(f"*-sm{compiled.arch}-{compiled.cubin[:8]}.cubin"))
    code = max(sass.functions(sass.disassemble(cubin, aot.tool("cuobjdump"))).values(), key=len)
    metrics = entry.metrics(
        compiled.kernel,
        compiled.arch,
        code,
        registers=compiled.registers,
        stack=compiled.stack,
        shared=(compiled.shared_static, compiled.shared_dynamic),
        warps=compiled.num_warps,
        config=compiled.config,
        stages=compiled.num_stages,
        cubin_sha256=compiled.cubin,
        **(_emulated(launch) if counters else entry.NOT_EMULATED),
    )
    return entry.row(launch.op, "triton", launch.case, launch.dtype, metrics)


def _emulated(launch: Launch) -> dict[str, Any]:
    """Return the counters of one CTA, or the fault that the emulator finds; nothing where it does not know an
    instruction.
    """
    from ..emulate import counters
    from ..emulate.parse import PtxError
    from ..emulate.program import EmulationError

    try:
        metrics, _ = counters.count(launch.launch, launch.arch)
    except EmulationError as fault:
        return entry.NOT_EMULATED | {"emulation_fault": str(fault).splitlines()[0]}
    except PtxError:  # an instruction that is not emulated: sm_100's tensor memory
        return entry.NOT_EMULATED
    return entry.NOT_EMULATED | metrics
