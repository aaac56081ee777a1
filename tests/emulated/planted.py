"""Faults in compiled code: change or remove one statement of a kernel's PTX and see if the emulator reports it.

python -m tests.emulated.planted [--arch 80,90,100] [--dtype bfloat16] [--kernel forward] [--most 6] prints a table of
the counts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from ptx_emulator import launches
from ptx_emulator.parse import Constant, Kernel
from ptx_emulator.program import EmulationError, Program
from retro_kernels.testing import compare, inputs
from tests.emulating import emulating

#: fault -> the statements that it applies to, and the new statement (None: removed)
PLANTS: dict[str, tuple[Callable, Callable]] = {
    "a barrier gone": (lambda s: s.opcode == "bar.sync", lambda s: None),
    "a wait for copies gone": (lambda s: s.opcode == "cp.async.wait_group", lambda s: None),
    "a wait for products gone": (lambda s: s.opcode.startswith("wgmma.wait_group"), lambda s: None),
    "a fence of the async proxy gone": (lambda s: s.opcode.startswith("fence.proxy.async"), lambda s: None),
    "a fence of products gone": (lambda s: s.opcode.startswith("wgmma.fence"), lambda s: None),
    "a commit of products gone": (lambda s: s.opcode.startswith("tcgen05.commit"), lambda s: None),
    "a wait for an mbarrier gone": (
        lambda s: s.opcode.startswith("mbarrier.try_wait"),
        lambda s: dataclasses.replace(s, opcode="mov.pred", operands=[s.operands[0], Constant(-1)]),
    ),
    "a wait for tensor memory gone": (lambda s: s.opcode.startswith("tcgen05.wait"), lambda s: None),
    "a predicate of a load lost": (
        lambda s: s.predicate is not None and s.opcode.startswith("ld.global"),
        lambda s: dataclasses.replace(s, predicate=None),
    ),
    "a store's offset beyond its tile": (
        lambda s: s.opcode.startswith("st.shared"),
        lambda s: dataclasses.replace(
            s, operands=[dataclasses.replace(s.operands[0], offset=s.operands[0].offset + (1 << 18)), *s.operands[1:]]
        ),
    ),
}

LOW_PARTS = "tf32 for tf32x3"  # planted in all places at once

#: faults that need a false predicate, as at the edges of the grid
_PREDICATES = {"a predicate of a load lost"}

#: calls whose launches get faults; together they launch every kernel
CALLS = (
    (
        "chunked_cross_attention",
        lambda dtype: inputs.cross_attention(dtype=dtype, N=130, M=64, R=128, D=64, B=1, H=1, gate=True, mask="token"),
    ),
    (
        "chunked_cross_attention",
        lambda dtype: inputs.cross_attention(dtype=dtype, N=40, M=16, R=24, D=24, B=1, H=2, G=1),
    ),
    ("relative_attention", lambda dtype: inputs.self_attention(dtype=dtype, N=160, B=1, D=64, H=1, causal=True)),
    ("relative_attention", lambda dtype: inputs.self_attention(dtype=dtype, N=1, S=400, B=1, D=64, H=1)),
    ("relative_logits", lambda dtype: inputs.relative_logits(dtype=dtype, N=70, key_len=90)),
    ("topk_chunks", lambda dtype: inputs.topk(dtype=dtype, Q=9, S=140, D=48, k=5, docs=True, causal_gap=1)),
    ("topk_chunks", lambda dtype: inputs.topk(dtype=dtype, Q=2, S=1200, D=16, k=5)),
    ("leaky_average", lambda dtype: inputs.leaky(dtype=dtype, N=300, B=1, H=1, D=24, segments=3)),
)


def recorded(arch: int, dtype: torch.dtype, only: str | None = None) -> list:
    """Return the launches of CALLS with their tensors, the first of each kernel. only: a part of the name."""
    log: list = []
    for op, make in sorted(CALLS, key=lambda call: not only or only.split("_")[0] not in call[0]):  # likely ones first
        with emulating(arch, log=log):
            compare.run(op, make(dtype), "triton")
        if any(only == launch.name for launch in log):
            break
    first = {launch.name: launch for launch in reversed(log) if not only or only in launch.name}
    return list(first.values())[::-1]


def struck(
    whole: Kernel, plant: str, most: int | None = None, matters: Callable[[int], bool] = lambda at: True
) -> Iterator[Kernel]:
    """Yield the kernel with the fault in one place, for every place where it matters, or for `most` of them."""
    strikes, change = PLANTS[plant]
    places = [at for at, statement in enumerate(whole.statements) if strikes(statement) and matters(at)]
    if most is not None and len(places) > most:
        places = [places[k * len(places) // most] for k in range(most)]
    for at in places:
        statement = whole.statements[at]
        other = copy.copy(whole)
        other.statements = list(whole.statements)
        # a no-op keeps every label in place
        other.statements[at] = change(statement) or dataclasses.replace(
            statement, opcode="membar.cta", operands=[], predicate=None
        )
        yield other


def variants(launch, arch: int, kernel: launches.Compiled, plant: str, most: int | None = None) -> Iterator:
    """Yield the variants of `struck` for a Triton launch."""
    whole = kernel.program.kernel

    def fails(at: int) -> bool:
        """Return whether some thread of the grid has a false predicate at this statement, by planting a trap there."""
        statement = whole.statements[at]
        other = copy.copy(whole)
        other.statements = list(whole.statements)
        other.statements[at] = dataclasses.replace(statement, opcode="trap", operands=[], negate=not statement.negate)
        return "trap" in (reported(launch, arch, dataclasses.replace(kernel, program=Program(other))) or "")

    for other in struck(whole, plant, most, fails if plant in _PREDICATES else lambda at: True):
        yield dataclasses.replace(kernel, program=Program(other))


def without_low_parts(kernel: launches.Compiled) -> Iterator[launches.Compiled]:
    """Return the kernel with the low part of every tf32 operand 0: one product instead of three."""
    whole = kernel.program.kernel
    other = copy.copy(whole)
    other.statements, high, low = [], set(), set()
    for statement in whole.statements:
        if statement.opcode == "cvt.rna.tf32.f32":
            target, source = statement.operands
            (low if source.name in low else high).add(target.name)
        if statement.opcode == "sub.f32" and getattr(statement.operands[2], "name", None) in high:
            low.add(statement.operands[0].name)
            statement = dataclasses.replace(statement, opcode="mov.b32", operands=[statement.operands[0], Constant(0)])
        other.statements.append(statement)
    if low:
        yield dataclasses.replace(kernel, program=Program(other))


def busiest(launch, arch: int, kernel: launches.Compiled) -> range:
    """Return the CTA that executes most instructions: a fault shows there as well as in the whole grid."""
    executed = []
    fresh = dataclasses.replace(kernel, program=Program(kernel.program.kernel))
    for cta in range(math.prod(launch.grid)):
        before = sum(c.executed for c in fresh.program.counts())
        launches.run(launch, arch, kernel=fresh, only=range(cta, cta + 1))
        executed.append(sum(c.executed for c in fresh.program.counts()) - before)
    most = executed.index(max(executed))
    return range(most, most + 1)


def reported(launch, arch: int, kernel: launches.Compiled, only: range | None = None) -> str | None:
    """Return the emulator's report of a launch with a planted fault, or None."""
    try:
        launches.run(launch, arch, kernel=kernel, only=only)
    except EmulationError as error:
        return str(error).splitlines()[0].split(": ", 1)[1]
    return None


class Counts(NamedTuple):
    planted: int
    reported: int
    values: int  # not reported, but the results changed: tests of values find it


def counted(
    launch, arch: int, kernel: launches.Compiled, variants: Iterable, only: range | None, memory: list[torch.Tensor]
) -> Counts:
    """Run a launch with each variant, each from the same memory."""
    before = [tensor.clone() for tensor in memory]
    launches.run(launch, arch, kernel=kernel, only=only)
    after = [tensor.clone() for tensor in memory]
    planted = said = differ = 0
    for variant in variants:
        for tensor, value in zip(memory, before, strict=True):
            tensor.copy_(value)
        planted += 1
        if reported(launch, arch, variant, only) is not None:
            said += 1
        elif not all(map(torch.equal, memory, after)):
            differ += 1
    for tensor, value in zip(memory, after, strict=True):
        tensor.copy_(value)
    return Counts(planted, said, differ)


def memory_of(launch) -> list[torch.Tensor]:
    """Return the bytes of each storage of a launch."""
    storages = {v.data_ptr(): v.untyped_storage() for v in launch.arguments.values() if isinstance(v, torch.Tensor)}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]


def count(
    arch: int, dtype: torch.dtype, only: str | None = None, most: int | None = None
) -> Iterator[tuple[str, str, Counts]]:
    """Yield (kernel, fault, counts). most: places that are tried, spread over the kernel; None: all."""
    for launch in recorded(arch, dtype, only):
        kernel = launches.compiled(launch, arch)
        memory = memory_of(launch)
        cta = busiest(launch, arch, kernel)
        for plant in PLANTS:
            where = None if plant in _PREDICATES else cta
            found = counted(launch, arch, kernel, variants(launch, arch, kernel, plant, most), where, memory)
            if found.planted:
                yield launch.name, plant, found
        found = counted(launch, arch, kernel, without_low_parts(kernel), None, memory)
        if found.planted:
            yield launch.name, LOW_PARTS, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", default="80,90,100")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernel", help="only kernels whose name contains this")
    parser.add_argument("--most", type=int, help="places in which a plant is tried, spread over the kernel")
    options = parser.parse_args()
    columns = [*PLANTS, LOW_PARTS]
    print(f"| architecture | kernel | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for arch in map(int, options.arch.split(",")):
        found = count(arch, getattr(torch, options.dtype), options.kernel, options.most)
        for kernel, rows in itertools.groupby(found, key=lambda row: row[0]):
            cells = {plant: drawn(counts) for _, plant, counts in rows}
            print(f"| sm_{arch} | `{kernel}` | {' | '.join(cells.get(c, '') for c in columns)} |", flush=True)


def drawn(counts: Counts) -> str:
    """ "5 of 6": five of six reported; "3 + 2 of 6": two of the others show in values."""
    return f"{counts.reported}{f' + {counts.values}' if counts.values else ''} of {counts.planted}"


if __name__ == "__main__":
    main()
