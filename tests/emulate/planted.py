"""Faults in compiled code: one statement of a kernel's PTX taken away or changed, and whether the emulator reports it.

    python -m tests.emulate.planted [--arch 80,90] [--dtype bfloat16]

prints the table of docs/emulation.md.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from bench.emulate import launches
from bench.emulate.parse import Constant, Kernel
from bench.emulate.program import EmulationError, Program
from retro_kernels.testing import compare, inputs

#: what is planted -> which statements it can strike, and what becomes of one (None: it is gone)
PLANTS: dict[str, tuple[Callable, Callable]] = {
    "a barrier gone": (lambda s: s.opcode == "bar.sync", lambda s: None),
    "a wait for copies gone": (lambda s: s.opcode == "cp.async.wait_group", lambda s: None),
    "a wait for products gone": (lambda s: s.opcode.startswith("wgmma.wait_group"), lambda s: None),
    "a fence of the async proxy gone": (lambda s: s.opcode.startswith("fence.proxy.async"), lambda s: None),
    "a fence of products gone": (lambda s: s.opcode.startswith("wgmma.fence"), lambda s: None),
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

#: calls whose launches are struck
CALLS = {
    "chunked_cross_attention": lambda dtype: inputs.cross_attention(
        dtype=dtype, N=130, M=64, R=128, D=64, B=1, H=1, gate=True, mask="token"
    ),
    "relative_attention": lambda dtype: inputs.self_attention(dtype=dtype, N=160, B=1, D=64, H=1, causal=True),
}


def recorded(arch: int, dtype: torch.dtype) -> list:
    """The launches of CALLS with the tensors they had."""
    log: list = []
    for op, make in CALLS.items():
        with launches.emulating(arch, log=log):
            compare.run(op, make(dtype), "triton")
    return log


def struck(whole: Kernel, plant: str, most: int | None = None) -> Iterator[Kernel]:
    """The kernel with the plant in one place, for every place, or for `most` of them."""
    strikes, change = PLANTS[plant]
    places = [at for at, statement in enumerate(whole.statements) if strikes(statement)]
    if most is not None and len(places) > most:
        places = [places[k * len(places) // most] for k in range(most)]
    for at in places:
        statement = whole.statements[at]
        other = copy.copy(whole)
        other.statements = list(whole.statements)
        # a statement that does nothing keeps every label where it is
        other.statements[at] = change(statement) or dataclasses.replace(
            statement, opcode="membar.cta", operands=[], predicate=None
        )
        yield other


def variants(kernel: launches.Compiled, plant: str, most: int | None = None) -> Iterator[launches.Compiled]:
    """As `struck`, for a Triton launch."""
    for other in struck(kernel.program.kernel, plant, most):
        yield dataclasses.replace(kernel, program=Program(other))


def without_low_parts(kernel: launches.Compiled) -> Iterator[launches.Compiled]:
    """The kernel with the low part of every tf32 operand 0: one product where three make a float32 product."""
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
    """The CTA that executes most instructions: a fault shows there as well as in the whole grid."""
    executed = []
    fresh = dataclasses.replace(kernel, program=Program(kernel.program.kernel))
    for cta in range(math.prod(launch.grid)):
        before = sum(c.executed for c in fresh.program.counts())
        launches.run(launch, arch, kernel=fresh, only=range(cta, cta + 1))
        executed.append(sum(c.executed for c in fresh.program.counts()) - before)
    most = executed.index(max(executed))
    return range(most, most + 1)


def reported(launch, arch: int, kernel: launches.Compiled, only: range | None = None) -> str | None:
    """What the emulator says of a launch with a planted fault; None: nothing."""
    try:
        launches.run(launch, arch, kernel=kernel, only=only)
    except EmulationError as error:
        return str(error).splitlines()[0].split(": ", 1)[1]
    return None


def count(
    arch: int, dtype: torch.dtype, only: str | None = None, most: int | None = None
) -> dict[tuple[str, str], tuple[int, int]]:
    """(kernel, plant) -> (reported, planted). most: places in which a
    plant is tried, spread over the kernel; None: all.
    """
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    seen = set()
    for launch in recorded(arch, dtype):
        if launch.name in seen or (only and only not in launch.name):
            continue
        seen.add(launch.name)
        kernel = launches.compiled(launch, arch)
        cta = busiest(launch, arch, kernel)
        for plant in PLANTS:
            where = None if "predicate" in plant else cta  # those matter at the edges of the grid
            said = [reported(launch, arch, variant, where) for variant in variants(kernel, plant, most)]
            if said:
                counts[launch.name, plant] = (sum(s is not None for s in said), len(said))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", default="80,90")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernel", help="only kernels whose name contains this")
    options = parser.parse_args()
    print("| architecture | kernel | planted | reported |\n|---|---|---|---|")
    for arch in map(int, options.arch.split(",")):
        for (kernel, plant), (hits, all_) in count(arch, getattr(torch, options.dtype), options.kernel).items():
            print(f"| sm_{arch} | `{kernel}` | {plant} | {hits} of {all_} |", flush=True)


if __name__ == "__main__":
    main()
