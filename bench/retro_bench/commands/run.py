"""check kernels, time them, and record both

Appends each record to a JSON-lines file as soon as its contender ends, so that an interrupted run keeps its records.
`--resume FILE` measures only the rest. Never times a case that fails its check. Measures one case of every op first, in
float32 and then in the other types. A baseline whose first call takes longer than a second is sampled once and not
differentiated. Exit code 0 if every check passed and every op has a time, also if --deadline left out cases.
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
from ..registry import CASES, Work
from ..report import terminal
from . import exits, measuring, options, progress

if TYPE_CHECKING:
    from ..measure import runner

CEILINGS_EVERY_S = 30  # on CPUs: other work lowers the ceilings for a while, and the highest of a run count
CEILINGS_SHARE = 0.1  # most of a run's time that they take
#: default folder of records: with the others in a checkout, else in the working directory
RESULTS = environment.ROOT / "bench" / "results" if (environment.ROOT / "setup.py").exists() else Path("bench-results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    options.add_effort(parser)
    where, add, usual = parser.add_mutually_exclusive_group(), parser.add_argument, samples.Effort()
    new = f"append records to this file (default: a new one in {RESULTS.name})"
    lacking = "measure what this file lacks for this tree, and append it"
    where.add_argument("--json", type=options.output, metavar="FILE", help=new)
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
    arguments.json = None if arguments.resume else path  # an interruption names it
    if arguments.fresh:
        path.unlink(missing_ok=True)
    skip = _finished(path, run) if arguments.resume else frozenset()
    writer = record.Writer(path)
    if not arguments.no_ceilings:
        run.measure_ceilings()
    records: dict[str, dict] = {}  # by id: the last one counts
    looked, steps, slow = time.monotonic(), 0, set()

    def append(measured: dict) -> None:
        nonlocal looked, steps
        if measured["time"] and (why := environment.throttled(run.device)):
            slow.add(why)
            return  # --resume measures it again
        writer.write(measured)
        records[measured["id"]] = measured
        pause = max(CEILINGS_EVERY_S, run.ceilings_s / CEILINGS_SHARE)
        between = run.pace.done > steps  # the first record of a case: no other contender is being timed
        if run.ceilings and run.device == "cpu" and between and time.monotonic() - looked > pause:
            run.measure_ceilings()
            looked = time.monotonic()
        steps = run.pace.done

    try:
        measuring.walk(run, selection, arguments, writer, append, skip)
        if run.ceilings and records:
            if run.device == "cpu":
                run.measure_ceilings()
            _share(list(records.values()), run.ceilings)
            record.replace(path, list(records.values()))
    except BaseException:
        _show(records, writer, "the run was interrupted")
        raise
    _show(records, writer, "the time limit was reached")
    if slow:
        progress.say(f"the GPU's clock was throttled ({'; '.join(sorted(slow))}): such times are not recorded")
        return exits.INCONCLUSIVE
    if not records and skip:
        print(f"nothing left to measure in {path}")
        return exits.OK
    return measuring.exit_code(options.records(path))


def _show(records: dict[str, dict], writer: record.Writer, why: str) -> None:
    if records:
        print(terminal.times(list(records.values())))
        remedy = f"; --resume {writer.path} measures them"
        print(terminal.verdict(list(records.values()), writer.requested, writer.path, why, remedy))


def _share(records: list[dict], best: dict) -> None:
    """Set the rooflines of a run's records by its highest ceilings: a share must not depend on when a case ran.

    A ceiling that a kernel exceeds was measured too low. It is raised to the kernel's own rate.
    """
    from ..measure import ceilings

    shares = [(one, Work(**one["work"]), samples.estimate(one["time"])) for one in records if one["roofline"]]
    for one, work, seconds in shares:
        best = ceilings.raised(best, work, one["dtype"], seconds, one["id"])
    for one in records:
        one["ceilings"] = best
    for one, work, seconds in shares:
        one["roofline"] = ceilings.roofline(work, best, one["dtype"], seconds)


def _finished(path: Path, run: runner.Run) -> frozenset[str]:
    """Return the ids that the file holds for this tree, errors left out. Raises UsageError for another machine."""
    if not path.exists():
        raise exits.UsageError(f"--resume {path}: no such file")
    records = record.latest(options.records(path)).values()
    here = {"device": environment.device(run.device), "environment": environment.environment(), "time": True}
    if why := machines.difference(records, [here]):
        raise exits.UsageError(f"--resume {path}: measured elsewhere: {why}")
    done = [r for r in records if r["git"]["sha"] == run.git["sha"] and r["status"] != "error"]
    cases = {(kernel, name): {"case": case.content()} for (kernel, name), case in CASES.items()}
    done = [r for r in done if not record.case_change(r, cases.get((r["op"], r["case"]["name"]), r))]
    return frozenset(r["id"] for r in done if r["time"] or r["status"] != "ok")
