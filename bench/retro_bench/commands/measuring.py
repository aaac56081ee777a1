"""Loop of `check`, `run` and `profile`: walk the selection, show progress, pass on the records."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
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

    return runner.Run(selection.device, seed=arguments.seed, **more)


def planned(selection: choose.Selection) -> list[tuple[Any, str, list[str]]]:
    """Return (case, type, modes) in their order: one case of every op in its first type, then in its other types, then
    the second case of every op. A run that is cut short still shows every op.
    """
    work, cases = [], {}
    for case in choose.cases(selection):
        if modes := choose.modes(case, selection):
            rank = cases[case.op] = cases.get(case.op, -1) + 1
            work += [(rank, i, case, dtype, modes) for i, dtype in enumerate(choose.dtypes(case, selection))]
    return [tuple(one[2:]) for one in sorted(work, key=lambda one: one[:2])]


def walk(
    run: runner.Run,
    selection: choose.Selection,
    arguments: argparse.Namespace,
    writer: record.Writer,
    keep: Callable[[dict[str, Any]], None],
    skip: frozenset[str] = frozenset(),
) -> None:
    """Run the selected cases but the ids in `skip`. `writer` notes the ids that are requested.

    Pass each record on as soon as it is made; the last one of an id counts. A requested id without a record was left
    out because of the deadline.
    """
    from ..measure import runner

    work, requested = [], []
    for case, dtype, modes in planned(selection):
        names = {m: _ids(case, dtype, m, selection) for m in (modes if run.timed else [runner.CHECK])}
        left = [mode for mode, ids in names.items() if not skip.issuperset(ids)]
        requested += [one for mode in left for one in names[mode]]
        work.append((case, dtype, left if run.timed else modes if left else []))
    work = [step for step in work if step[2]]
    writer.request(run.run, requested)
    # a run measures its ceilings once more in the end
    limit = arguments.deadline and max(arguments.deadline - run.ceilings_s, 0.0)
    bar = progress.Progress(len(work), arguments.quiet)
    if selection.device == "cuda":
        compile_ahead(selection, limit, bar)
    ops = len({case.op for case, _, _ in work})
    run.pace = Pace([_expected(run, case, modes, selection) for case, _, modes in work], limit, ops, run.begun)
    effort = run.effort
    most = f", at most {limit / 60:.1f} min" if limit else ""
    bar.note(f"about {sum(run.pace.work) / 60:.0f} min on two quiet cores{most}")
    failed = set()
    for case, dtype, modes in work:
        if run.pace.over():
            break
        run.effort = dataclasses.replace(effort, seconds=effort.seconds * run.pace.share())
        run.oracle_share = run.pace.share()
        bar.step(f"{case.op}/{case.name} {dtype}")
        made = runner.run_case(run, case, dtype, modes, list(choose.contenders(case, selection)))
        for measured in progress.until_interrupted(made):
            keep(measured)
            if measured["status"] in record.FAILED and measured["id"] not in failed:
                bar.note(f"{measured['status']}: {measured['id']}: {measured['reason']}")
                failed.add(measured["id"])
        run.pace.done += 1


def compile_ahead(selection: choose.Selection, limit: float | None, bar: progress.Progress) -> None:
    """Compile the selection's kernels, in one process per core. A kernel that fails here fails in its call too.

    limit: seconds of the whole run, of which half may be spent here.
    """
    import torch

    import retro_kernels as rk

    from ..measure import profilers, runner

    begun, pace = time.monotonic(), Pace([], limit and limit / 2)

    def planned(contender, case, dtype: str, mode: str) -> None:
        """Make one call, whose launches `warm_up` replaces. Its inputs are freed at once."""
        if not pace.over():
            with contextlib.suppress(RuntimeError, ValueError):
                inputs = case.make(0, selection.device, getattr(torch, dtype))
                runner.step(contender, case, inputs, mode == "fwdbwd")()

    calls = [functools.partial(planned, *one) for _, *one in profilers.kernels(selection) if one[0].name == "triton"]
    with contextlib.suppress(RuntimeError):  # if one kernel fails, the others are compiled
        if calls:
            rk.warm_up(*calls)
    bar.note(f"kernels compiled or found in {time.monotonic() - begun:.0f} s")


def _expected(run: runner.Run, case, modes: list[str], selection: choose.Selection) -> float:
    """Return the expected seconds of one case and type on two quiet cores."""
    able = sum(choose.able(c, case, selection.device) for c in choose.contenders(case, selection)) if run.timed else 0
    return CHECK_S + able * len(modes) * USED_SHARE * run.effort.seconds


def _ids(case, dtype: str, mode: str, selection: choose.Selection) -> list[str]:
    """Return the ids of every contender of this case, type and mode. A ratio needs all of them from one run."""
    return [record.identity(case.op, c.name, case.name, dtype, mode) for c in choose.contenders(case, selection)]


def exit_code(records: Iterable[dict[str, Any]]) -> int:
    """Return 2 if a check failed or an op broke, 5 if an op that this machine serves has no result, else 0.

    A baseline that breaks is shown and not used. A baseline with wrong results fails the run.
    """
    done, served = set(), set()
    for one in record.latest(list(records)).values():
        if one["status"] == "numerics_fail" or (one["status"] == "error" and one["role"] != "baseline"):
            return exits.NUMERICS
        if one["role"] != "baseline":
            served |= {one["op"]} if one["status"] != "unsupported" else set()
            done |= {one["op"]} if one["status"] == "ok" and (one["time"] or one["mode"] == "check") else set()
    return exits.OK if done and served <= done else exits.NOTHING_MEASURED
