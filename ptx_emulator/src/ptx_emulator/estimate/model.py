"""Estimate of a launch's time on a GPU that is not here, from its compiled code, executed by the emulator.

Three CTAs of the grid are executed and traced; many more are only counted, and the three are scaled to the grid's
average (a causal launch has CTAs with thirty times the work of others). A warp of a traced CTA passes a scoreboard: an
instruction runs once its operands are there and its pipe is free. All warps of the CTA run alike and share the pipes;
no warp passes a barrier, a branch or a wait for copies. The result is the CTA's time alone, with its exposed latency.

The launch's time joins six lower bounds: latency (waves of CTAs), each pipe of the busiest SM, L2 and HBM. They overlap
imperfectly, so they are joined by a norm (`OVERLAP`); the longest names the bound. The constants below were fitted to
times that others measured on real GPUs (`calibration`; docs/decisions, 019, has the errors).

Left out: clocks that fall under load, cache misses of other launches, bank conflicts inside wgmma, and the order of
instructions that ptxas chose (issue slots are PTX's, scaled by the ratio of the two lengths).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .. import counters, launches
from ..machines import LANES, MUFU_RESULTS, SCHEDULERS, SHARED_BYTES, Machine
from ..memory import elements
from ..parse import PtxError, Vector
from ..program import Program
from . import machine_code

_SAMPLES = (0.18, 0.47, 0.83)  # positions in the grid, because causal launches have short and long CTAs
_WHOLE = 0.9  # share of the bytes of written sectors from which on they count as written whole
_COUNTED, _GOLDEN = 20, 0.6180339887498949  # CTAs counted: spread evenly over every dimension of the grid

# Fitted to published times (`calibration`), the same values for all machines.
L2_BYTES = 40.0  # of L2, a cycle and SM
START, LIFE = 120.0, 700.0  # cycles of a CTA's start and end: issue slots of its SM; latency
OVERLAP = 4.0  # exponent of the norm that joins the bounds; infinity would be their maximum
BEGIN = 1.5e-6  # seconds from a kernel's start to its first CTA's start, plus from its last CTA's end to its own
EVENTS = 6e-6  # seconds that timing by events adds
L1_KEPT = 96 << 10  # bytes: a tensor up to this size is read from L2 once an SM


#: cycles from issue to result, by the first part of an opcode. Published microbenchmarks of sm_80 and sm_90
_LATENCY = {"ex2": 22, "lg2": 22, "rcp": 24, "rsqrt": 24, "sqrt": 40, "div": 40, "shfl": 24, "vote": 14, "redux": 24}
_LATENCY |= {"ldmatrix": 33, "mma": 34, "bar": 24, "barrier": 24, "st": 4, "mov": 0}
_ARITHMETIC, _SHARED_LOAD, _WGMMA = 5, 30, 60
_L2_LOAD, _HBM_LOAD = 280, 700  # under load
_MUFU = ("ex2", "lg2", "rcp", "rsqrt", "sqrt")
#: integers, comparisons and conversions pass at half the rate of float additions and products
_HALF_RATE = ("add", "sub", "mul", "mad", "min", "max", "shl", "shr", "and", "or", "xor", "not", "setp", "selp", "cvt")
_FULL_RATE_TYPES = ("f32", "f16", "f16x2", "bf16x2")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a launch and its bound. shares: each candidate for the bound, as a part of the time."""

    seconds: float
    bound: str
    shares: dict[str, float]
    waves: float
    hbm_bytes: int
    l2_bytes: int


def estimate(launch, machine: Machine, compiled: dict[str, Any] | None = None) -> Estimate:
    """Estimate the time of one launch on a machine.

    Args:
        launch: a `Launch`, or any object with its four fields.
        compiled: its static metrics, from `machine_code.static_record`. None: they are read first.

    Raises:
        EmulationError, PtxError: the emulator refuses the kernel.
    """
    launch = launches.Launch.of(launch)
    if launch.options.get("num_ctas", 1) > 1:
        raise PtxError(
            f"{launch.kernel.__name__}: no estimate of clusters (num_ctas): no published time of one was fitted"
        )
    if compiled is None:
        compiled = machine_code.static_record(launch, machine.arch)
    tensors = {id(t): t for t in launch.arguments.values() if isinstance(t, Tensor)}
    sizes = [t.numel() * t.element_size() for t in tensors.values()]
    number, resident = math.prod(launch.grid), max(compiled["blocks_per_sm"], 1)
    samples, work, traffic = _samples(launch, machine.arch)
    kept = sum(size for size in sizes if size <= L1_KEPT)
    hbm = sum(moved(size, number, *one) for size, one in traffic)
    l2 = number * work * statistics.fmean(counters.summary(one.counts())["global_bytes"] for one in samples)
    # a CTA that reads its data again finds them in L2 if the data of all resident CTAs fit
    own = counters.SECTOR_BYTES * sum(max(read, written) for _, (read, written, *_) in traffic)
    once = number * counters.SECTOR_BYTES * sum(read + written for _, (read, written, *_) in traffic)
    if min(number, resident * machine.multi_processor_count) * own > machine.L2_cache_size:
        hbm += max(0.0, l2 - once)
    hbm = round(hbm)
    l2 = max(hbm, l2 - number * kept)  # every CTA reads a small tensor whole, and finds it in L1
    ratio = compiled["instructions"] / len(samples[0].kernel.statements)
    load = _L2_LOAD + (_HBM_LOAD - _L2_LOAD) * min(1.0, hbm / l2)  # cycles; data that is read again comes from L2
    scored = [scoreboard(one, compiled["warps"], ratio, load, machine) for one in samples]
    alone = work * statistics.fmean(cycles for cycles, _ in scored)
    pipes = {name: work * statistics.fmean(busy[name] for _, busy in scored) for name in scored[0][1]}
    pipes["issue"] += START
    most = -(-number // machine.multi_processor_count)  # CTAs of the busiest SM
    candidates = {
        "latency": -(-most // resident) * (alone + LIFE) / machine.hertz,
        **{name: most * cycles / machine.hertz for name, cycles in pipes.items()},
        "HBM": hbm / machine.hbm,
        "L2": l2 / (L2_BYTES * machine.multi_processor_count * machine.hertz),
    }
    bound = max(candidates, key=candidates.get)
    seconds = sum(value**OVERLAP for value in candidates.values()) ** (1 / OVERLAP) + BEGIN
    shares = {name: round(value / seconds, 3) for name, value in candidates.items()}
    waves = number / (machine.multi_processor_count * resident)
    return Estimate(seconds, bound, shares, waves, hbm, round(l2))


def moved(size: int, ctas: int, read: float, written: float, in_part: float, bytes_written: float) -> float:
    """Return the bytes of HBM traffic of one tensor: reads and writes, each at most the tensor once.

    A sector that is written in part is read first, unless the CTAs together write all its bytes.

    Args:
        size: bytes of the tensor.
        read, written, in_part: distinct sectors per CTA. bytes_written: distinct bytes per CTA.
    """
    sector = counters.SECTOR_BYTES
    reads, writes, stored = (min(size, ctas * one) for one in (sector * read, sector * written, bytes_written))
    if stored < _WHOLE * writes:
        reads = max(reads, writes * in_part / written)
    return reads + writes


def _samples(launch, arch: int) -> tuple[list[Program], float, list[tuple]]:
    """Return traced programs of some CTAs, the average work of a CTA as a part of theirs, and the traffic.

    The traffic is, for each tensor, its bytes and the averages per CTA of `Program.traffic`.
    """
    kernel, real, number = launches.compiled(launch, arch), counters.materialised(launch), math.prod(launch.grid)

    def executed(start: Callable[[Program], object], ctas: set[int]) -> list[Program]:
        """Execute each CTA by a program of its own, which `start` makes trace or count."""
        programs = []
        for cta in sorted(ctas):
            fresh = kernel.fresh()
            start(fresh.program)
            launches.run(real, arch, checks=False, only=range(cta, cta + 1), kernel=fresh)
            programs.append(fresh.program)
        return programs

    def instructions(programs: list[Program]) -> float:
        return statistics.fmean(sum(one.executed for one in program.counts()) for program in programs)

    traced = executed(Program.trace, {min(int(share * number), number - 1) for share in _SAMPLES})
    counted = executed(Program.traffic, {int((k + 0.5) * _GOLDEN % 1.0 * number) for k in range(_COUNTED)})
    traffic = sum(program.traffic() for program in counted) / len(counted)
    made = kernel.packed([real.arguments.get(name) for name in kernel.signature])
    tensors = [t for t in real.arguments.values() if isinstance(t, Tensor)]
    dense = {(t.data_ptr(), elements(t) * t.element_size()): t.numel() * t.element_size() for t in tensors}
    sizes = [dense.get(place, place[1]) for place in made.regions]
    return traced, instructions(counted) / instructions(traced), list(zip(sizes, traffic.tolist()))


class _Cost(NamedTuple):
    """Cost of one execution of an instruction by a CTA."""

    kind: str
    slots: float  # of issue
    pipe: str | None = None
    cycles: float = 0.0  # cycles in the pipe
    latency: float = 0.0
    wait: int = 0  # groups that a wait for copies leaves
    operands: float = 0.0  # cycles of reading them from shared memory


def scoreboard(
    program: Program, warps: int, ratio: float, load: float, machine: Machine
) -> tuple[float, dict[str, float]]:
    """Return (cycles of a CTA alone, cycles that it keeps each pipe busy) of one traced CTA's instructions in order."""
    costs = [_cost(s, c, warps, ratio, load, machine) for s, c in zip(program.kernel.statements, program.counts())]
    ready: dict[int, float] = defaultdict(float)
    free = dict.fromkeys(("tensor", "MUFU", "shared", "ALU"), 0.0)
    busy = dict.fromkeys(("issue", *free), 0.0)
    copies: list[float] = []  # when each group of copies arrives
    issued = arrives = stored = 0.0
    for at in program.trace():
        targets, sources, predicate = program.registers[at]
        cost = costs[at]
        if cost.kind == "wgmma":  # a chain of products on one accumulator is ordered by the tensor cores
            sources = sources[: len(sources) - len(targets)]
        start = max(issued, ready[predicate], *(ready[r] for r in sources))
        issued += cost.slots
        busy["issue"] += cost.slots
        done = start
        if cost.pipe is not None:
            free[cost.pipe] = done = max(free[cost.pipe], start) + max(cost.cycles, cost.operands)
            busy[cost.pipe] += cost.cycles
            busy["shared"] += cost.operands  # read while the product runs
        if cost.kind == "cp.copy":
            arrives = max(arrives, done + load)
        elif cost.kind == "cp.commit":
            copies.append(arrives)
        elif cost.kind == "cp.wait":
            issued = max([issued, *copies[: len(copies) - cost.wait][-1:]])
        elif cost.kind == "bar":
            issued = max(issued, stored) + cost.latency
        elif cost.kind == "bra":
            issued = max(issued, start)
        elif cost.kind in ("st", "stmatrix", "ldmatrix", "ld"):
            stored = max(stored, done)
        for register in targets:
            ready[register] = done + cost.latency
    return max(issued, stored, *ready.values(), *free.values()), busy


def _operand_cycles(statement, warps: int) -> float:
    """Cycles in which a wgmma reads its operands from shared memory: B, and A unless it lies in registers."""
    parts = statement.opcode.split(".")
    n, k = _columns_and_depth(parts[4])
    rows = 0 if isinstance(statement.operands[1], Vector) else 64
    size = {"tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}.get(parts[-1], 2)
    return size * k * (n + rows) * max(warps // 4, 1) / SHARED_BYTES


def _columns_and_depth(shape: str) -> tuple[int, int]:
    """(N, K) of "m64n128k16"."""
    n, k = shape.removeprefix("m64n").split("k")
    return int(n), int(k)


def _cost(statement, counted, warps: int, ratio: float, load: float, machine: Machine) -> _Cost:
    root, *parts = statement.opcode.split(".")
    slots = ratio * max(warps / SCHEDULERS, 1.0)
    latency, units = _LATENCY.get(root, _ARITHMETIC), counted.units / max(counted.executed, 1)
    if root == "cp" and "wait_group" in parts:
        return _Cost("cp.wait", slots, wait=statement.operands[0].value)
    if root == "cp" and "commit_group" in parts:
        return _Cost("cp.commit", slots)
    if root == "cp":
        return _Cost("cp.copy", slots, "shared", units / 4)  # a sector is 32 bytes of 128
    if root == "wgmma" and parts[0] in ("fence", "commit_group", "wait_group"):
        return _Cost(parts[0], slots)
    if root == "wgmma":
        n, k = _columns_and_depth(parts[3])
        double = 2 if parts[-1] == "tf32" else 1
        cycles = double * 2.0 * 64 * n * k * max(warps // 4, 1) / machine.tensor_flops
        return _Cost("wgmma", slots, "tensor", cycles, _WGMMA, operands=_operand_cycles(statement, warps))
    if root == "mma":
        m, n, k = 16, 8, int(parts[2].rsplit("k", 1)[1])
        double = 2 if "tf32" in parts else 1
        rate = machine.tensor_flops * (0.62 if machine.arch == 90 else 1.0)  # of wgmma's rate, on sm_90
        return _Cost("mma", slots, "tensor", double * 2.0 * m * n * k * warps / rate, latency)
    if root in _HALF_RATE and (root in ("min", "max", "setp", "selp", "cvt") or parts[-1] not in _FULL_RATE_TYPES):
        return _Cost(root, slots, "ALU", 2 * slots, latency)
    if root in _MUFU:
        return _Cost(root, slots, "MUFU", LANES * warps / MUFU_RESULTS, latency)
    if root in ("bar", "barrier"):
        return _Cost("bar", slots, latency=latency)
    if root in ("ld", "st", "ldmatrix", "stmatrix") and "param" not in parts:
        outside = "global" in parts
        latency = 0 if root.startswith("st") else load if outside else _SHARED_LOAD
        return _Cost(root, slots, "shared", units / 4 if outside else units, latency)
    if root in ("mov", "cvta") or "param" in parts:
        return _Cost(root, 0.0)  # names, for ptxas
    if root == "shfl":
        return _Cost(root, slots, "shared", float(warps), latency)
    return _Cost(root, slots, latency=latency)
