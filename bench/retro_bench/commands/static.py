"""compile GPU launches and read their machine code; no GPU

Reads registers, stack bytes (above 0: spills), shared memory, CTAs per SM, tensor instructions and asynchronous copies;
of the hot loop its issue slots and a lower bound in cycles. For AMD's processors it reads VGPRs, AGPRs, spilled VGPRs,
stack bytes, LDS, CTAs per compute unit and the number of MFMA or WMMA instructions, from the assembly. Exit code 1 if a
kernel could not launch (no CTA fits an SM).
"""

import argparse
import json
from pathlib import Path

from ..records import record
from ..report import terminal
from . import emulator, exits, options, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_ops(parser, cases=False)
    options.add_launches(parser)
    options.add_arch(parser, ",".join(map(str, options.ARCHES)))
    add = parser.add_argument
    add("--keep", type=Path, metavar="DIR", help="leave the cubins there, and AMD's assembly")
    add("--json", type=options.output, metavar="FILE", help="append records to this file")
    add("--jobs", type=options.positive, help="processes (default: one a core)")
    add("--fingerprints", type=options.output, metavar="FILE", help="write {id: hash of sources}, compile nothing")
    add("--only", type=Path, metavar="FILE", help="compile only the ids in this JSON list")
    add("--counters", action="store_true", help="execute one CTA of each launch on the emulator")
    add("--quiet", action="store_true", help="print no progress")


def execute(arguments: argparse.Namespace) -> int:
    arches = options.arches(arguments.arch)
    emulator.required()
    from ..static import entry, table

    try:
        selected = table.select(arches, options.parts(arguments), _ids(arguments.only) if arguments.only else None)
        if arguments.fingerprints:
            hashes = {unit.id: unit.fingerprint for unit in (*selected.triton, *selected.cuda)}
            arguments.fingerprints.write_text(json.dumps(hashes, indent=1))
            return exits.OK
        writer, records = record.Writer(arguments.json), []
        shown = progress.Progress(len(selected), arguments.quiet)
        for item in table.rows(selected, arguments.keep, arguments.jobs, arguments.counters):
            shown.step(item["id"])
            records.append(item)
            writer.write(item)
    except entry.NoToolchain as e:
        raise exits.UsageError(str(e)) from None
    if not records:
        progress.say("nothing to compile: no launch has such an id")
        return exits.NOTHING_MEASURED
    print(terminal.static(records))
    if arguments.json:
        print(f"\n{len(records)} records in {arguments.json}")
    too_big = [item["id"] for item in records if item["static"]["blocks_per_sm"] == 0]
    spilling = [item["id"] for item in records if item["static"]["stack_bytes"]]
    print(f"\n{len(records)} kernels, {len(spilling)} with stack", *spilling, sep="\n  ")
    if too_big:
        why = "more registers or shared memory than a block may have"
        print(f"{len(too_big)} CANNOT LAUNCH: {why}", *too_big, sep="\n  ")
    return exits.REGRESSION if too_big else exits.OK


def _ids(path: Path) -> list[str]:
    try:
        ids = json.loads(path.read_text())
    except (ValueError, RecursionError) as e:
        raise exits.UsageError(f"--only {path}: expected a JSON list of ids; {e}") from None
    if not isinstance(ids, list):
        raise exits.UsageError(f"--only {path}: expected a JSON list of ids; got {type(ids).__name__}")
    return ids
