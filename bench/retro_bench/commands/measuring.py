"""Loop of `check`, `run` and `profile`: walk the selection, show progress, pass on the records."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..measure import choose
from ..measure.pace import Pace
from ..records import record
from . import exits, progress

if TYPE_CHECKING:
    from ..measure import runner

CHECK_S = 1.0  # time to check one case and type: inputs, oracle, every contender's errors
USED_SHARE = 0.6  # part of its time that a contender takes: samples that agree end early


def start(arguments: argparse.Namespace, selection: choose.Selection, **more) -> runner.Run:
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)  # the C++ kernels ask torch for theirs
    from ..measure import runner

    share = math.inf if arguments.exhaustive else 1.0
    return runner.Run(selection.device, seed=arguments.seed, oracle_share=share, **more)


def walk(
    run: runner.Run,
    selection: choose.Selection,
    arguments: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
    skip: frozenset[str] = frozenset(),
) -> Counter[str]:
    """Run the selected cases but the ids in `skip`. Count their records by status; "late": cases after the deadline."""
    from ..measure import runner

    work = [
        (case, dtype, modes)
        for case in choose.cases(selection)
        for dtype in choose.dtypes(case, selection)
        if (modes := choose.modes(case, selection))
    ]
    counts, limit = Counter(), arguments.deadline
    bar = progress.Progress(len(work), arguments.quiet)
    if selection.device == "cuda":
        spent = compile_ahead(selection, limit, bar)
        limit = None if limit is None else max(limit - spent, 0.0)
    pace = Pace([_expected(run, case, modes, selection) for case, _, modes in work], limit)
    effort, share = run.effort, run.oracle_share
    most = f", at most {limit / 60:.1f} min" if limit else ""
    bar.note(f"about {sum(pace.work) / 60:.0f} min on two quiet cores{most}")
    for done, (case, dtype, modes) in enumerate(work):
        if pace.over():
            bar.note(f"the deadline is over: {len(work) - done} of {len(work)} are left; --resume measures them")
            counts["late"] = len(work) - done
            break
        run.effort = dataclasses.replace(effort, seconds=effort.seconds * pace.share(done))
        run.oracle_share = share * pace.share(done)
        left = [m for m in modes if not _done(case, dtype, m, selection, skip)]
        bar.step(f"{case.kernel}/{case.name} {dtype}" + ("" if left else ": already measured"))
        if not left:
            continue
        for measured in runner.run_case(run, case, dtype, left, list(choose.contenders(case, selection))):
            keep(measured)
            # a baseline that breaks is shown and not used; a baseline with wrong results fails the run
            broken = measured["status"] == "error" and measured["role"] == "baseline"
            counts["baseline error" if broken else measured["status"]] += 1
            if measured["status"] in record.FAILED:
                bar.note(f"{measured['status']}: {measured['id']}: {measured['reason']}")
    return counts


def compile_ahead(selection: choose.Selection, limit: float | None, bar: progress.Progress) -> float:
    """Compile the selection's kernels in parallel and return the seconds. One that fails here fails in its call too."""
    from ..measure import compiling

    begun = time.monotonic()
    count, _, _ = compiling.compile_selection(selection, lambda text: None, limit=limit and limit / 2)
    bar.note(f"{count} kernels compiled or found in {time.monotonic() - begun:.0f} s")
    return time.monotonic() - begun


def _expected(run: runner.Run, case, modes: list[str], selection: choose.Selection) -> float:
    """Return the expected seconds of one case and type on two quiet cores."""
    able = sum(choose.able(c, case, selection.device) for c in choose.contenders(case, selection)) if run.timed else 0
    return CHECK_S + able * len(modes) * USED_SHARE * run.effort.seconds


def _done(case, dtype: str, mode: str, selection: choose.Selection, skip: frozenset[str]) -> bool:
    """Whether every contender of this case, type and mode has a record: a ratio needs all of them from one run."""
    wanted = {"/".join((case.kernel, c.name, case.name, dtype, mode)) for c in choose.contenders(case, selection)}
    return wanted <= skip


def exit_code(counts: Counter[str], kernels_ok: int) -> int:
    """Return 2 if a check failed or a contender broke, 3 if the deadline left cases out, 5 if no kernel ran."""
    if counts["numerics_fail"] or counts["error"]:
        return exits.NUMERICS
    if counts["late"]:
        return exits.INCONCLUSIVE
    return exits.OK if kernels_ok else exits.NOTHING_MEASURED
