"""What `check` and `run` share: walk the selection, show progress, hand records to whoever wants them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import exits, plan, progress
from ..measure import runner


def start(arguments: argparse.Namespace, chosen: plan.Selection, **more) -> runner.Run:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)  # the C++ kernels ask torch for theirs
    share = math.inf if arguments.exhaustive else 1.0
    return runner.Run(chosen.device, seed=arguments.seed, oracle_share=share, **more)


def walk(
    run: runner.Run,
    chosen: plan.Selection,
    keep: Callable[[dict[str, Any]], None],
    skip: frozenset[str] = frozenset(),
    quiet: bool = False,
) -> dict[str, int]:
    """Run every selected case; returns how many records have each status. `skip`: ids that need no measuring again."""
    work = [
        (case, dtype, modes) for case in plan.cases(chosen) for dtype in plan.dtypes(case, chosen) if (modes := plan.modes(case, chosen))
    ]
    counts: dict[str, int] = {}
    with progress.shown(len(work), quiet) as bar:
        for case, dtype, modes in work:
            left = [m for m in modes if not _done(case, dtype, m, chosen, skip)]
            bar.step(f"{case.kernel}/{case.name} {dtype}" + ("" if left else ": already measured"))
            if not left:
                continue
            for record in runner.run_case(run, case, dtype, left, list(plan.contenders(case, chosen))):
                keep(record)
                # a baseline that breaks is shown and not used; one that computes something else makes the run red
                counted = "baseline error" if record["status"] == "error" and record["role"] == "baseline" else record["status"]
                counts[counted] = counts.get(counted, 0) + 1
                if record["status"] in ("numerics_fail", "error", "oom"):
                    bar.note(f"{record['status']}: {record['id']}: {record['reason']}")
    return counts


def _done(case, dtype: str, mode: str, chosen: plan.Selection, skip: frozenset[str]) -> bool:
    """True where every contender of this case, type and mode has a record: a ratio needs all of them from one run."""
    wanted = {"/".join((case.kernel, c.name, case.name, dtype, mode)) for c in plan.contenders(case, chosen)}
    return wanted <= skip


def exit_code(counts: dict[str, int], kernels_ok: int) -> int:
    """2 if anything failed its numerics or broke, 5 if no kernel was measured at all."""
    if counts.get("numerics_fail") or counts.get("error"):
        return exits.NUMERICS
    return exits.OK if kernels_ok else exits.NOTHING_MEASURED
