"""Find the tile with the least estimated time for each row of the tables that serves a shipped case, without a GPU.

The walk is that of `measure.tune`: from a row's committed tile to its neighbours. A tile is compiled; it must fit and
must not spill.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator

from ptx_emulator import EmulationError, PtxError
from ptx_emulator.estimate import Machine, estimate, static_record
from retro_kernels.compile import aot, triton_private
from retro_kernels.compile.target import KNOWN
from retro_kernels.compile.tiles import watched

from ..commands import exits
from ..measure.tune import Trial, Tuned, in_place, search, tile_text

#: share of the estimated time that a tile must save to be kept; the estimate cannot order tiles that are nearer
#: (`ptx-emulator estimate --calibration`)
LEAST_GAIN = 0.10


def launches_of(op: str, case: str, dtype: str, arch: int) -> list:
    """Return the launches of a shipped case in order, with the tables as they are."""
    return [one.launch for one in _shipped(op, arch) if (one.case, one.dtype) == (case, dtype)]


def rows_of(op: str, case: str, dtype: str, arch: int) -> list[dict]:
    """Return the rows of the op's table that serve a shipped case, each once, in the order of their look-ups."""
    rows = []
    with watched() as seen:
        for one in _shipped(op, arch):  # a call's whole plan is made before its first launch
            if (one.case, one.dtype) == (case, dtype):
                rows += [row for served, row in seen if served == op and row not in rows]
            seen.clear()
    return rows


def _shipped(op: str, arch: int) -> Iterator[aot.CompileCase]:
    if op not in aot.ops():
        raise exits.UsageError(f"--op {op}: expected one of {', '.join(aot.ops())}")
    return importlib.import_module(f"retro_kernels.ops.{op}.triton").aot_cases(KNOWN[arch])


def changed(base: list, new: list) -> list:
    """Return the launches of `new` that `base` lacks, by the part of a compilation key that a tile decides."""

    def identity(launch) -> tuple:
        options = {k: v for k, v in launch.arguments.items() if isinstance(v, (int, str, bool, tuple))}
        return launch.name, launch.grid, tuple(launch.options.items()), tuple(sorted(options.items()))

    known = {identity(launch) for launch in base}
    return [launch for launch in new if identity(launch) not in known]


def judged(row: dict, launches: list, machine: Machine, base: bool = False) -> Trial:
    """Estimate the time of the launches that a row decides. An unfit tile has a reason instead.

    base: the row is the committed one, whose spills are allowed.
    """
    known: dict[tuple, float] = {}  # slabs have one code and one grid
    total = 0.0
    for launch in launches:
        try:
            same = launch.name, launch.grid, triton_private.source(launch, KNOWN[machine.arch])[0].hash()
            if same in known:
                total += known[same]
                continue
            static = static_record(launch, machine.arch)
            if static["shared_dynamic_bytes"] > KNOWN[machine.arch].shared_memory or not static["blocks_per_sm"]:
                return Trial(row, "error", reason=f"does not fit: {static['shared_dynamic_bytes']} bytes shared")
            if static["stack_bytes"] and not base:
                return Trial(row, "error", reason=f"{static['stack_bytes']} bytes of stack")
            known[same] = estimate(launch, machine, static).seconds
            total += known[same]
        except (EmulationError, PtxError) as fault:
            return Trial(row, "error", reason=f"not emulated: {str(fault).splitlines()[0]}")
        except Exception as fault:  # raised by a tile that can't be compiled
            return Trial(row, "error", reason=f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}")
    return Trial(row, "ok", total)


def tune(
    op: str,
    case: str,
    dtype: str,
    machine: Machine,
    *,
    rounds: int,
    say: Callable[[str], None],
    over: Callable[[], bool],
    judge: Callable[..., Trial] = judged,
) -> Iterator[Tuned]:
    """Yield every row that serves the case, each as soon as it is tuned."""
    base = launches_of(op, case, dtype, machine.arch)
    for row in rows_of(op, case, dtype, machine.arch):
        if over():
            break
        trials = _trials(op, case, dtype, machine, base, row, say, over, judge)
        yield Tuned(op, row, *search(row, trials, rounds, LEAST_GAIN))


def _trials(op, case, dtype, machine, base, row, say, over, judge) -> Callable[[list[dict]], list[Trial]]:
    """Return the judgement of rows instead of `row`, for `measure.tune.search`. Each row is judged once."""

    def launches_with(new: dict) -> list:
        with in_place(op, [(row, new)]):
            return launches_of(op, case, dtype, machine.arch)

    probe = {**row, "num_stages": row["num_stages"] + 1}  # changes the launches that the row decides
    mine = changed(launches_with(probe), base)
    known: list[Trial] = []

    def trial_of(new: dict) -> Trial | None:
        """Return None for a row that is cut to the problem's size and then equals the committed one."""
        if new == row:
            return judge(row, mine, machine, base=True)
        now = launches_with(new)
        launches = changed(base, now)
        if not launches:
            return None
        trial = judge(new, launches, machine)
        # the tile may change other launches too: count the change of their time
        gone = changed(mine, changed(now, base))
        if gone and trial.status == "ok":
            followed = judge(row, gone, machine, base=True)
            rest = None if followed.seconds is None else trial.seconds - followed.seconds
            trial = dataclasses.replace(followed, row=new, seconds=rest)
        return trial

    def trials(rows: list[dict]) -> list[Trial]:
        found = [trial for trial in known if trial.row == rows[0]]
        for new in rows[len(found) :]:
            if found and over():
                break
            if (trial := trial_of(new)) is not None:
                told = f"{1e6 * trial.seconds:.1f} us" if trial.status == "ok" else trial.reason
                say(f"{op} {row['kernel']}: {tile_text(trial.row)}: {told}")
                found.append(trial)
                known.append(trial)
        return found

    return trials
