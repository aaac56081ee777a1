"""check kernels, time them, and record both

Appends each record to a JSON-lines file as soon as it is measured: an interrupted run keeps its records, and `--resume
FILE` measures only the rest. Never times a case that fails its check.
"""

from __future__ import annotations

import argparse
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..measure import samples
from ..records import environment, machines, record
from ..registry import Work
from ..report import terminal
from . import exits, measuring, options, progress

if TYPE_CHECKING:
    from ..measure import runner

CEILINGS_EVERY_S = 30  # on CPUs: other work lowers the ceilings for a while, and the highest of a run count
#: default folder of records: with the others in a checkout, else in the working directory
RESULTS = environment.ROOT / "bench" / "results" if (environment.ROOT / "setup.py").exists() else Path("bench-results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_effort(parser)
    where, add, usual = parser.add_mutually_exclusive_group(), parser.add_argument, samples.Effort()
    new = f"append records to this file (default: a new one in {RESULTS.name})"
    lacking = "measure what this file lacks for this tree, and append it"
    where.add_argument("--json", type=Path, metavar="FILE", help=new)
    where.add_argument("--resume", type=Path, metavar="FILE", help=lacking)
    add("--fresh", action="store_true", help="with --json: replace the file")
    least = f"take at least this many samples (default {usual.least}; 1 of a call beyond {usual.slow_s} s)"
    long = f"sample each contender for about this long (default {usual.seconds} s)"
    add("--samples", type=options.positive, help=least)
    add("--seconds", type=options.seconds, default=usual.seconds, help=long)
    add("--no-ceilings", action="store_true", help="do not measure the machine; leave out the roofline")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.fresh and not arguments.json:
        raise exits.UsageError("--fresh: replaces the file of --json; name one")
    selection = options.selection(arguments)
    effort = samples.Effort(seconds=arguments.seconds)
    if least := arguments.samples:
        effort = samples.Effort(least, max(effort.most, least), arguments.seconds, math.inf)
    run = measuring.start(arguments, selection, effort=effort)
    path = arguments.resume or arguments.json or RESULTS / f"{selection.device}-{datetime.now(UTC):%Y%m%d-%H%M%S}.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    skip = _finished(path, run) if arguments.resume else frozenset()
    writer = record.Writer(path)
    if not arguments.no_ceilings:
        run.measure_ceilings()
    records: list[dict] = []
    looked, slow = time.monotonic(), set()

    def keep(measured: dict) -> None:
        nonlocal looked
        if measured["time"] and (why := environment.throttled(run.device)):
            slow.add(why)
            return  # --resume measures it again
        writer.write(measured)
        records.append(measured)
        if run.ceilings and run.device == "cpu" and time.monotonic() - looked > CEILINGS_EVERY_S:
            run.measure_ceilings()
            looked = time.monotonic()

    try:
        counts = measuring.walk(run, selection, arguments, keep, skip)
        if run.ceilings and run.device == "cpu" and records:
            run.measure_ceilings()
            _share(records, run.ceilings)
            record.replace(path, records)
    finally:
        if records:
            print(terminal.times(records))
            print(f"\n{len(records)} records in {path}")
    if slow:
        progress.say(f"the GPU's clock was throttled ({'; '.join(sorted(slow))}): such times are not recorded")
        return exits.INCONCLUSIVE
    if not records and skip:
        print(f"nothing left to measure in {path}")
        return exits.OK
    return measuring.exit_code(counts, sum(r["time"] is not None and r["role"] != "baseline" for r in records))


def _share(records: list[dict], best: dict) -> None:
    """Set the rooflines of a run's records by its highest ceilings: a share must not depend on when a case ran."""
    from ..measure import ceilings

    for one in records:
        one["ceilings"] = best
        if one["roofline"]:
            work = Work(**one["work"])
            one["roofline"] = ceilings.roofline(work, best, one["dtype"], samples.estimate(one["time"]))


def _finished(path: Path, run: runner.Run) -> frozenset[str]:
    """Return the ids that the file holds for this tree, errors left out. Raises UsageError for another machine."""
    if not path.exists():
        raise exits.UsageError(f"--resume {path}: no such file")
    records = record.latest(options.records(path)).values()
    here = {"device": environment.device(run.device), "environment": environment.environment(), "time": True}
    if why := machines.difference(records, [here]):
        raise exits.UsageError(f"--resume {path}: measured elsewhere: {why}")
    return frozenset(r["id"] for r in records if r["git"]["sha"] == run.git["sha"] and r["status"] != "error")
