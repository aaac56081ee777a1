"""A static model of a launch's time on a GPU that is not here: from its compiled code, executed by the emulator.

Three CTAs of the grid are executed and their instructions kept in order; many more are only counted, and what the three
take is scaled to what the grid executes (of a causal launch some CTAs have thirty times the work of others). A warp of
each of the three passes a scoreboard: an instruction runs once its operands are there and its pipe is free, every pipe
being shared by the warps of the CTA (they run alike), and none passes a barrier, a branch or a wait for copies. That
gives the CTA's time alone, with the latency that its own work leaves exposed. An SM that holds several CTAs takes at
least the sum of what each asks of its busiest pipe; a launch takes at least what its bytes take from HBM and from L2.
The longest of these is the time, and names the bound.

Not in the model: clocks that fall under load, cache misses of other launches, bank conflicts inside wgmma, and ptxas's
order of instructions, of which only the number is taken (issue slots are PTX's by the ratio of the two lengths).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from typing import Any

from torch import Tensor

from ..emulate import counters, launches
from . import sass

_SAMPLES = (0.18, 0.47, 0.83)  # of the grid: causal launches have short and long CTAs
_COUNTED, _GOLDEN = 20, 0.6180339887498949  # CTAs counted: spread evenly over every dimension of the grid


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the model knows of a GPU. Rates are a cycle and SM unless they say seconds."""

    name: str
    arch: int
    multiprocessors: int
    hertz: float
    hbm: float  # bytes a second that a copy reaches
    l2: float  # bytes a second
    tensor: float  # FLOPs of half types
    mufu: float = 16.0  # results
    shared: float = 128.0  # bytes
    launch: float = 2.5e-6  # seconds from one kernel's end to the next one's start


#: 4.8 TB/s HBM3e of which a copy gets nine tenths, 1.755 GHz, 989 TFLOP/s at 1.83 GHz: data sheet; L2: E, from H100's
MACHINES = {90: Machine("H200", 90, 132, 1.755e9, 0.9 * 4.8e12, 5.5e12, sass.TENSOR_FLOPS[90])}

#: cycles from issue to result, by the first part of an opcode. Published microbenchmarks of sm_80 and sm_90
_LATENCY = {
    "ex2": 22,
    "lg2": 22,
    "rcp": 24,
    "rsqrt": 24,
    "sqrt": 40,
    "div": 40,
    "shfl": 24,
    "vote": 14,
    "redux": 24,
    "ldmatrix": 33,
    "mma": 34,
    "bar": 24,
    "barrier": 24,
    "st": 4,
    "mov": 0,
}
_ARITHMETIC, _SHARED_LOAD, _WGMMA = 5, 30, 60
_L2_LOAD, _HBM_LOAD = 280, 700  # under load
_MUFU = ("ex2", "lg2", "rcp", "rsqrt", "sqrt")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a launch and what bounds it; shares: every candidate for the bound, as a part of the time."""

    seconds: float
    bound: str
    shares: dict[str, float]
    waves: float
    hbm_bytes: int
    l2_bytes: int


def estimate(launch, compiled: dict[str, Any], machine: Machine) -> Estimate:
    """The model of one launch. compiled: its `static` record.

    Raises:
        EmulationError, PtxError: the emulator refuses the kernel.
    """
    number, resident = math.prod(launch.grid), max(compiled["blocks_per_sm"], 1)
    hbm = _argument_bytes(launch)
    samples, work = _samples(launch, machine.arch)
    l2 = counters.SECTOR_BYTES * number * work * statistics.fmean(sectors(counted) for _, counted, _ in samples)
    ratio = compiled["instructions"] / len(samples[0][1])
    load = _L2_LOAD + (_HBM_LOAD - _L2_LOAD) * min(1.0, hbm / l2)  # cycles; what is read again comes from L2
    timed = [scoreboard(*sample, compiled["warps"], ratio, load, machine) for sample in samples]
    alone = work * statistics.fmean(cycles for cycles, _ in timed)
    pipes = {name: work * statistics.fmean(busy[name] for _, busy in timed) for name in timed[0][1]}
    most = -(-number // machine.multiprocessors)  # CTAs of the busiest SM
    candidates = {
        "latency": -(-most // resident) * alone / machine.hertz,
        **{name: most * cycles / machine.hertz for name, cycles in pipes.items()},
        "HBM": hbm / machine.hbm,
        "L2": l2 / machine.l2,
    }
    bound = max(candidates, key=candidates.get)
    seconds = candidates[bound] + machine.launch
    shares = {name: round(value / seconds, 3) for name, value in candidates.items()}
    return Estimate(seconds, bound, shares, number / (machine.multiprocessors * resident), hbm, round(l2))


def _argument_bytes(launch) -> int:
    """Bytes of the tensors that a launch is given, each once: what it must read or write, if it uses all of them."""
    places = {id(t): t.numel() * t.element_size() for t in launch.arguments.values() if isinstance(t, Tensor)}
    return sum(places.values())


def _samples(launch, arch: int) -> tuple[list[tuple], float]:
    """(program, counts, trace) of some CTAs; what a CTA of the grid executes on average, as a part of what they do."""
    kernel, real, number = launches.compiled(launch, arch), counters.materialised(launch), math.prod(launch.grid)

    def execute(cta: int, traced: bool):
        program = type(kernel.program)(kernel.program.kernel)
        if traced:
            program.trace()
        fresh = dataclasses.replace(kernel, program=program)
        launches.run(real, arch, checks=False, only=range(cta, cta + 1), kernel=fresh)
        return program, program.counts(), program.trace() if traced else None

    found = [execute(cta, True) for cta in sorted({min(int(share * number), number - 1) for share in _SAMPLES})]
    every = sorted({int((k + 0.5) * _GOLDEN % 1.0 * number) for k in range(_COUNTED)})
    mean = statistics.fmean(executed(execute(cta, False)[1]) for cta in every)
    return found, mean / statistics.fmean(executed(counted) for _, counted, _ in found)


def executed(counted) -> int:
    """Instructions, by CTAs."""
    return sum(c.executed for c in counted)


def sectors(counted) -> int:
    """Sectors of global memory."""
    return sum(c.units for c in counted if c.requests and "global" in c.opcode.split("."))


def scoreboard(
    program, counted, trace, warps: int, ratio: float, load: float, machine: Machine
) -> tuple[float, dict[str, float]]:
    """(cycles of a CTA alone, cycles that it keeps each pipe busy) of one CTA's instructions in order."""
    costs = [
        _cost(statement, c, warps, ratio, load, machine) for statement, c in zip(program.kernel.statements, counted)
    ]
    ready: dict[int, float] = defaultdict(float)
    free = dict.fromkeys(("tensor", "MUFU", "shared"), 0.0)
    busy = dict.fromkeys(("issue", *free), 0.0)
    copies: list[float] = []  # when each group of copies arrives
    issued = arrives = stored = 0.0
    for at in trace:
        targets, sources, predicate = program.registers[at]
        root, pipe, cycles, latency, slots, wait = costs[at]
        if root == "wgmma":  # a chain of products on one accumulator is ordered by the tensor cores
            sources = sources[: len(sources) - len(targets)]
        start = (
            max(issued, ready[predicate], *(ready[r] for r in sources)) if sources else max(issued, ready[predicate])
        )
        issued += slots
        busy["issue"] += slots
        done = start
        if pipe is not None:
            free[pipe] = max(free[pipe], start) + cycles
            busy[pipe] += cycles
            done = free[pipe]
        if root == "cp.copy":
            arrives = max(arrives, done + load)
        elif root == "cp.commit":
            copies.append(arrives)
        elif root == "cp.wait":
            issued = max([issued, *(copies[: len(copies) - wait] if wait else copies)[-1:]])
        elif root == "bar":
            issued = max(issued, stored) + latency
        elif root == "bra":
            issued = max(issued, start)
        elif root in ("st", "stmatrix", "ldmatrix", "ld"):
            stored = max(stored, done)
        for register in targets:
            ready[register] = done + latency
    return max(issued, stored, *ready.values(), *free.values()), busy


def _cost(statement, counted, warps: int, ratio: float, load: float, machine: Machine):
    """(what it is, pipe, cycles of it, latency, issue slots, groups that a wait leaves) of one execution by a CTA."""
    root, *parts = statement.opcode.split(".")
    slots = ratio * max(warps / sass.SCHEDULERS, 1.0)
    latency, units = _LATENCY.get(root, _ARITHMETIC), counted.units / max(counted.executed, 1)
    if root == "cp" and "wait_group" in parts:
        return "cp.wait", None, 0.0, 0, slots, statement.operands[0].value
    if root == "cp":
        kind = "cp.commit" if "commit_group" in parts else "cp.copy"
        return kind, "shared" if kind == "cp.copy" else None, units / 4, 0, slots, 0  # a sector is 32 bytes of 128
    if root == "wgmma" and parts[0] in ("fence", "commit_group", "wait_group"):
        return parts[0], None, 0.0, 0, slots, 0
    if root == "wgmma":
        n, k = (int(part) for part in parts[3].removeprefix("m64n").split("k"))
        double = 2 if parts[-1] == "tf32" else 1
        cycles = double * 2.0 * 64 * n * k * max(warps // 4, 1) / machine.tensor
        return "wgmma", "tensor", cycles, _WGMMA, slots, 0
    if root == "mma":
        m, n, k = 16, 8, int(parts[2].rsplit("k", 1)[1])
        double = 2 if "tf32" in parts else 1
        # mma.sync reaches some 62% of wgmma's rate on sm_90
        return "mma", "tensor", double * 2.0 * m * n * k * warps / (0.62 * machine.tensor), latency, slots, 0
    if root in _MUFU:
        return root, "MUFU", sass.LANES * warps / machine.mufu, latency, slots, 0
    if root in ("bar", "barrier"):
        return "bar", None, 0.0, latency, slots, 0
    if root in ("ld", "st", "ldmatrix", "stmatrix") and "param" not in parts:
        outside = "global" in parts
        latency = 0 if root.startswith("st") else load if outside else _SHARED_LOAD
        return root, "shared", units / 4 if outside else units, latency, slots, 0
    if root in ("mov", "cvta") or "param" in parts:
        return root, None, 0.0, 0, 0.0, 0  # names, for ptxas
    if root == "shfl":
        return root, "shared", float(warps), latency, slots, 0
    return root, None, 0.0, latency, slots, 0
