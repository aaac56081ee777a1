"""find the fastest tiles of Triton kernels

Walks from the committed tile to faster neighbours, one kernel of the call after the other. The tables are
retro_kernels/ops/<op>/tiles.json. A row serves every shape that it covers, so run the other cases (`check`, `run`)
before you commit the changes of --write.

--static needs no GPU: it compiles tiles of a shipped case (`static` names them), drops those that spill, and ranks the
rest by `estimate`. --write marks such a row "predicted" until a tile is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..measure import choose
from ..measure.pace import Pace
from ..records import record
from ..registry import CONTENDERS
from ..report import summary, tables
from . import emulator, exits, options
from .progress import say

if TYPE_CHECKING:
    from ..measure import tune

HEADER = ("op kernel", "row", "committed", "time", "best", "time", "tried", "unfit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    add = parser.add_argument
    add("--seconds", type=options.seconds, default=0.1, help="seconds of samples a tile (default 0.1)")
    add("--rounds", type=options.positive, default=6, help="most steps away from the committed tile (default 6)")
    options.add_deadline(parser)
    add("--static", action="store_true", help="rank tiles by estimated time, without a GPU")
    add("--machine", default="H200", metavar="GPU", help="with --static: rank tiles for this GPU (default H200)")
    add("--json", type=options.output, metavar="FILE", help="append results to this file; skip what it holds")
    add("--write", action="store_true", help="write the best tiles into the tables")


def execute(arguments: argparse.Namespace) -> int:
    from retro_kernels.compile import tiles

    tuned, pace, before = [], Pace([], arguments.deadline), _finished(arguments.json)
    for name, search in _estimated(arguments, pace) if arguments.static else _measured(arguments, pace):
        if name in before or pace.over():
            say(f"{name}: {'tuned before' if name in before else 'the deadline is over'}")
            continue
        found = []
        for item in search():
            found.append(item)
            if arguments.write and item.best.row != item.before:
                row = {key: value for key, value in item.best.row.items() if key != "predicted"}
                tiles.write_row(item.op, item.before, row | ({"predicted": True} if arguments.static else {}))
        tuned += found
        if arguments.json and not pace.over():
            _append(arguments.json, name, found)
    if not tuned:
        return exits.OK if before else exits.NOTHING_MEASURED
    print(tables.align([HEADER, *map(cells, tuned)]))
    if arguments.static:
        print(f"predicted for one {arguments.machine}, not measured")
    return exits.INCONCLUSIVE if pace.over() else exits.OK


def _measured(arguments: argparse.Namespace, pace: Pace) -> Iterator[tuple[str, Callable[[], list[tune.Tuned]]]]:
    """Yield the name of each case, type and mode that can run here, and the search for its tiles."""
    from ..measure import runner, timing, tune

    if arguments.backend not in (None, ("triton",)) or arguments.baselines:
        raise exits.UsageError("--backend, --baselines: only the tiles of triton are tuned, against each other")
    arguments.backend = ("triton",)
    selection = options.selection(arguments)
    run = runner.Run(selection.device, effort=timing.Effort(seconds=arguments.seconds))
    for case in choose.cases(selection):
        contender = CONTENDERS.get((case.op, "triton"))
        parts = itertools.product(choose.dtypes(case, selection), choose.modes(case, selection)) if contender else ()
        for dtype, mode in parts:
            name = f"{case.op}/{case.name}/{dtype}/{mode}"
            if why := choose.unsupported_case(case, selection.device) or choose.unsupported(
                contender, case, dtype, selection.device, mode == "fwdbwd"
            ):
                say(f"{name}: {why}")
                continue

            def search() -> list[tune.Tuned]:
                say(name)
                return tune.tune(tune.Bench(run, case, dtype, mode, contender), arguments.rounds, say, pace.over)

            yield name, search


def _estimated(arguments: argparse.Namespace, pace: Pace) -> Iterator[tuple[str, Callable[[], Iterator[tune.Tuned]]]]:
    """Yield the name of each shipped case and type, and the search for its tiles."""
    emulator.required()
    if not arguments.op or not arguments.case:
        raise exits.UsageError("--static: name an --op and a shipped --case")
    from ..static import tiles

    machine = options.machine(arguments)
    for op, case, dtype in itertools.product(arguments.op, arguments.case, arguments.dtype or ("bfloat16",)):
        if not tiles.rows_of(op, case, dtype, machine.arch):
            raise exits.UsageError(f"{op}: no shipped case {case} in {dtype}")
        how = {"rounds": arguments.rounds, "say": say, "over": pace.over}
        search = functools.partial(tiles.tune, op, case, dtype, machine, **how)
        yield f"{op}/{case}/{dtype}/{machine.name}", search


def _finished(path: Path | None) -> set[str]:
    """Names of the results that the file holds."""
    return {json.loads(line)["tuned"] for line in path.read_text().splitlines()} if path and path.exists() else set()


def _append(path: Path, name: str, found: list[tune.Tuned]) -> None:
    rows = [{"op": t.op, "before": t.before, "best": t.best.row, "trials": list(map(_trial, t.trials))} for t in found]
    record.append(path, {"tuned": name, "rows": rows})


def _trial(trial: tune.Trial) -> dict:
    """Return a tile and its seconds, or why it can't be used."""
    from ..measure import tune

    told = {"reason": trial.reason} if trial.seconds is None else {"seconds": trial.seconds}
    return {"tile": tune.tile_text(trial.row)} | told


def cells(item) -> tuple[str, ...]:
    from ..measure import tune

    row, first = item.before, item.trials[0]
    where = f"sm_{row['arch']} {row['bytes']} bytes, width {row['width']}"
    before, best = ((tune.tile_text(trial.row), summary.duration(trial.seconds)) for trial in (first, item.best))
    unfit = sum(trial.status != "ok" for trial in item.trials)
    return (f"{item.op} {row['kernel']}", where, *before, *best, str(len(item.trials)), str(unfit))
