"""Static metrics of Triton kernels of the imported tree, by `retro_kernels.compile.aot`, and of plug-ins."""

from __future__ import annotations

import collections
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptx_emulator import EmulationError, PtxError, gpu
from ptx_emulator import counters as emulated
from ptx_emulator.estimate import machine_code
from retro_kernels.compile import aot, triton_private
from retro_kernels.compile.target import KNOWN, Target

from .. import ops
from ..measure import runner
from ..registry import CONTENDERS, OPERATORS, cases_of
from . import entry, fingerprint

_SIMDS = 4  # per compute unit (CDNA), or per work-group processor with two compute units (RDNA)
#: metrics that are read from NVIDIA's machine code only
_UNREAD = ("async_copies", "copies_in_flight", "loop_issue_slots", "loop_tensor_instructions", "loop_cycles_at_least")


@dataclass(frozen=True)
class CompiledCase:
    """One compile in the order of `aot.compile_each`. A kernel's second and third launch in a case get #2 and #3."""

    op: str
    backend: str
    case: str
    dtype: str
    arch: int | str
    launch: Any  # a `Launch` of the imported tree
    values: dict[str, Any]  # arguments of the case's call, or of the launch if no case makes it
    recorded: bool  # made by a call of a plug-in and not by `aot`
    fingerprint: str | None  # None: not wanted

    @property
    def id(self) -> str:
        return entry.identity(self.op, self.backend, self.case, self.dtype)

    @property
    def wanted(self) -> bool:
        return self.fingerprint is not None


def launches(arches: list[int | str], parts: tuple[str, ...] | None) -> list[CompiledCase]:
    """Return every launch that aot compiles or a plug-in registered. Those that `parts` select have a fingerprint.

    Launches of plug-ins are recorded on the emulator, for NVIDIA's GPUs only.
    """
    if importlib.util.find_spec("triton") is None:
        raise entry.NoToolchain("static: needs triton and retro_kernels.compile.aot; pip install triton")
    every, seen = [], collections.Counter()
    theirs = OPERATORS.keys() - set(ops.NAMES)
    shipped = parts is None or any(part.partition("/")[0] not in theirs for part in parts)
    for arch in arches:
        amd, place = KNOWN[arch].backend == "hip", KNOWN[arch].name.replace("_", "")
        found = [] if amd else [(True, *launch) for launch in _recorded(arch)]
        for op, case in aot.cases(KNOWN[arch]) if shipped else ():
            name, call = f"{case.launch.name}:{case.case}:{place}", getattr(case, "call", ())  # an older tree has none
            values = dict(zip(getattr(call, "_fields", ()), call, strict=True))
            found.append((False, op, "triton", name, case.dtype, case.launch, values))
        for *place, launch, values in found:
            seen[*place] += 1
            foreign, op, backend, name, dtype = place
            if (count := seen[*place]) > 1:
                name += f"#{count}"
            wanted = entry.selected(entry.identity(op, backend, name, dtype), parts)
            mark = fingerprint.of_launch(*triton_private.source(launch, KNOWN[arch])) if wanted else None
            every.append(CompiledCase(op, backend, name, dtype, arch, launch, values, foreign, mark))
    return every


def _recorded(arch: int) -> Iterator[tuple[str, str, str, str, object, dict[str, Any]]]:
    """Yield (op, backend, case, dtype, launch, arguments) of every launch that plug-ins registered.

    A case's call is made on CPU tensors; its launches are kept and not executed. A program that reads a kernel's result
    to decide its next launch reads memory that nothing wrote.
    """
    for op, backend, name, dtype, call, values in _calls():
        with gpu(arch, runs=False) as log:
            call()
        for launch in log.launches:
            yield op, backend, f"{launch.name}:{name}:sm{arch}", dtype, launch, values


def _calls() -> Iterator[tuple[str, str, str, str, Callable[[], object], dict[str, Any]]]:
    for contender in CONTENDERS.values():
        for case in cases_of(contender.op) if contender.triton else ():
            for dtype in case.dtypes.get("cuda", ()):
                arguments = case.make(0, "cpu", getattr(torch, dtype))
                for mode in case.modes:
                    if not contender.reason(case, dtype, "cuda"):
                        call = runner.step(contender, case, arguments, mode == "fwdbwd")
                        values = {**case.shape, **case.options, **arguments}
                        yield case.op, contender.name, f"{case.name} {mode}", dtype, call, values


def rows(
    arches: list[int | str],
    selected: list[CompiledCase],
    every: list[CompiledCase],
    folder: Path,
    jobs: int | None,
    counters: bool = False,
) -> Iterator[dict[str, Any]]:
    """Compile the `selected` of `every`, read their machine code, and yield the rows in order, each when it is done.

    counters: also execute one CTA of each on the emulator.
    """
    for launch in selected:
        if launch.recorded:
            yield _row(launch, machine_code.static_record(launch.launch, launch.arch), counters)
    wanted = [launch for launch in selected if not launch.recorded]
    if not wanted:
        return
    ids = {launch.id for launch in wanted}
    # compile_each asks in the order in which `launches` listed
    flags = iter([launch.id in ids for launch in every if not launch.recorded])
    compiled = aot.compile_each(arches, None, folder, jobs, select=lambda op, case: next(flags))
    reading: collections.deque[Future] = collections.deque()
    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)  # each waits for a disassembler of its own
    try:
        for launch, result in zip(wanted, compiled, strict=True):
            reading.append(pool.submit(_read, launch, result, folder, counters))
            while reading and reading[0].done():
                yield reading.popleft().result()
        yield from (one.result() for one in reading)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C would otherwise wait for all that are queued


def _read(launch: CompiledCase, compiled: aot.Resources, folder: Path, counters: bool) -> dict[str, Any]:
    if compiled.agprs is not None:
        return _row(launch, amd_metrics(compiled, KNOWN[compiled.arch]), False)
    cubin = next(folder.glob(f"*-sm{compiled.arch}-{compiled.binary[:8]}.cubin"))
    function = max(machine_code.functions(cubin).values(), key=lambda one: len(one.code))
    metrics = machine_code.metrics(
        compiled.kernel,
        compiled.arch,
        function,
        compiled.shared_dynamic,
        compiled.num_warps,
        config=compiled.config,
        stages=compiled.num_stages,
        cubin_sha256=compiled.binary,
    )
    return _row(launch, metrics, counters)


def _row(launch: CompiledCase, metrics: dict[str, Any], counters: bool) -> dict[str, Any]:
    """Return a record. counters: add the counters of one CTA, or the fault that the emulator finds."""
    if counters:
        try:
            metrics |= emulated.count(launch.launch, launch.arch)[0]
        except EmulationError as fault:
            metrics["emulation_fault"] = str(fault).splitlines()[0]
        except PtxError:  # an instruction that is not emulated: sm_100's tensor memory
            pass
    return entry.row(launch.op, launch.backend, launch.case, launch.dtype, metrics, launch.values)


def amd_metrics(compiled: aot.Resources, target: Target) -> dict[str, Any]:
    """Return the metrics of a kernel for an AMD processor.

    registers: VGPRs, the AGPRs included. tensor_instructions: MFMA or WMMA.
    """
    shared = compiled.shared_static + compiled.shared_dynamic
    lds = target.shared_memory * (1 if target.warp_size == 64 else 2)  # bytes per compute unit or work-group processor
    fit = [compiled.waves * _SIMDS // compiled.num_warps, *([lds // shared] if shared else [])]
    return {
        "kernel": compiled.kernel,
        "arch": compiled.arch,
        "config": compiled.config,
        "registers": compiled.registers,
        "agprs": compiled.agprs,
        "spilled_registers": compiled.spills,
        "stack_bytes": compiled.stack,
        "shared_static_bytes": compiled.shared_static,
        "shared_dynamic_bytes": compiled.shared_dynamic,
        "warps": compiled.num_warps,
        "stages": compiled.num_stages,
        "blocks_per_sm": 0 if shared > target.shared_memory else min(fit),
        "cubin_sha256": compiled.binary,
        "tensor_instructions": compiled.matrix,
        **machine_code.NOT_EMULATED,
        **dict.fromkeys(_UNREAD),
    }
