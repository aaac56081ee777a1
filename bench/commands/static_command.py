"""ahead-of-time metrics of every shipped kernel and configuration; no GPU

Registers, stack bytes (above 0: spills), shared memory, CTAs per SM, tensor instructions, asynchronous copies, and of the hot loop its
issue slots and a lower bound in cycles. Exit code 1 if a kernel could not launch (no CTA fits an SM); with --spills also if one spills.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from .. import exits, record, static
from ..report import terminal
from . import _options

ARCHES = (80, 90, 100)
HEADER = ("kernel", "case", "type", "sm", "config", "regs", "stack", "shared", "CTAs/SM", "tensor", "async", "loop slots", "loop cycles >=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default=",".join(map(str, ARCHES)), help="comma-separated, of 80, 90, 100")
    parser.add_argument(
        "--kernel",
        type=_options.names,
        metavar="PART[,PART]",
        help="only what has one of these in its id, OP/triton/KERNEL:CASE:smARCH/TYPE",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the cubins there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records to this file")
    parser.add_argument("--jobs", type=_options.positive, help="processes (default: one a core)")
    parser.add_argument("--fingerprints", type=Path, metavar="FILE", help="compile nothing: write what would be, {id: hash of its sources}")
    parser.add_argument("--only", type=Path, metavar="FILE", help="compile only the ids in this JSON list")
    parser.add_argument("--spills", action="store_true", help="exit with 1 if any kernel spills")


def execute(arguments: argparse.Namespace) -> int:
    try:
        arches = [int(text) for text in arguments.arch.split(",")]
    except ValueError:
        arches = [0]
    if unknown := [arch for arch in arches if arch not in ARCHES]:
        raise exits.UsageError(f"--arch: expected some of {ARCHES}; got {unknown or arguments.arch}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise exits.UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")
    try:
        if arguments.fingerprints:
            arguments.fingerprints.write_text(json.dumps(static.listing(arches, arguments.kernel), indent=1))
            return exits.OK
        only = json.loads(arguments.only.read_text()) if arguments.only else None
        found = static.rows(arches, arguments.kernel, arguments.keep, arguments.jobs, only)
    except static.NoToolchain as e:
        raise exits.UsageError(str(e)) from None
    if not found:
        return exits.NOTHING_MEASURED
    print(table(found))
    if arguments.json:
        writer = record.Writer(arguments.json)
        for item in found:
            writer.write(item)
        print(f"\n{len(found)} records in {arguments.json}")
    too_big = [item["id"] for item in found if item["static"]["blocks_per_sm"] == 0]
    spilling = [item["id"] for item in found if item["static"]["stack_bytes"]]
    print(f"\n{len(found)} kernels, {len(spilling)} with stack" + "".join(f"\n  {name}" for name in spilling))
    if too_big:
        print(f"{len(too_big)} CANNOT LAUNCH: more registers or shared memory than a block may have" + "".join(f"\n  {n}" for n in too_big))
    return exits.REGRESSION if too_big or (spilling and arguments.spills) else exits.OK


def table(found: list[dict]) -> str:
    return terminal.align([HEADER, *map(_cells, found)])


def _cells(item: dict) -> tuple[str, ...]:
    s = item["static"]
    shared = (s["shared_static_bytes"] or 0) + (s["shared_dynamic_bytes"] or 0)
    cycles = "-" if s["loop_cycles_at_least"] is None else f"{s['loop_cycles_at_least']:.0f}"
    case = item["case"]["name"].split(":")[1] if item["backend"] == "triton" else ""
    numbers = (
        s["registers"],
        s["stack_bytes"],
        shared,
        "-" if s["blocks_per_sm"] is None else s["blocks_per_sm"],
        s["tensor_instructions"],
        s["async_copies"],
        s["loop_issue_slots"] or "-",
    )
    return (s["kernel"][:44], case, item["dtype"], str(s["arch"]), s["config"] or "-", *map(str, numbers), cycles)
