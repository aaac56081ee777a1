"""find the fastest tiles of Triton kernels

Walks from the committed tile to faster neighbours, one kernel of the call after the other. The tables are
retro_kernels/ops/<op>/tiles.json. A row serves every shape that it covers, so run the other cases (`check`, `run`)
before you commit the changes of --write.

--static needs no GPU: it compiles tiles of a shipped case (`static` names them), drops those that spill, and ranks the
rest by `estimate`. --write marks such a row "predicted" until a tile is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..measure import choose
from ..measure.pace import Pace
from ..registry import CONTENDERS
from ..report import summary, tables
from . import calls, exits, options
from .progress import say

if TYPE_CHECKING:
    from ..measure import tune

HEADER = ("kernel", "row", "committed", "time", "best", "time", "tried", "unfit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_selection(parser)
    parser.add_argument("--seconds", type=options.seconds, default=0.1, help="seconds of samples a tile (default 0.1)")
    parser.add_argument(
        "--rounds", type=options.positive, default=6, help="most steps away from the committed tile (default 6)"
    )
    options.add_deadline(parser)
    parser.add_argument("--static", action="store_true", help="rank tiles by estimated time, without a GPU")
    parser.add_argument(
        "--row", type=options.names, metavar="NAME[,NAME]", help="with --static: rank only these entries of the table"
    )
    parser.add_argument(
        "--tiles",
        type=_tiles,
        metavar="M/N/WARPS/STAGES[/REGISTERS][,...]",
        help="with --static: rank these tiles instead of the committed one's neighbours",
    )
    options.add_machine(parser, "with --static: rank tiles for this GPU (default H200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append results to this file; skip what it holds")
    parser.add_argument("--write", action="store_true", help="write the best tiles into the tables")


def _tiles(text: str) -> list[dict[str, int]]:
    names = ("block_m", "block_n", "num_warps", "num_stages", "max_registers")
    given = [[int(number) for number in tile.split("/")] for tile in text.split(",")]
    return [dict(zip(names[: max(len(tile), 4)], tile, strict=True)) for tile in given]


def execute(arguments: argparse.Namespace) -> int:
    from ..measure import runner, timing, tune

    if arguments.static:
        return execute_static(arguments)
    if arguments.backend not in (None, ("triton",)) or arguments.baselines:
        raise exits.UsageError("--backend, --baselines: only the tiles of triton are tuned, against each other")
    narrowed = argparse.Namespace(**{**vars(arguments), "backend": ("triton",)})
    selection = options.selection(narrowed)
    run = runner.Run(selection.device, effort=timing.Effort(seconds=arguments.seconds))
    tuned, pace, before = [], Pace([], arguments.deadline), _finished(arguments.json)
    for case in choose.cases(selection):
        contender = CONTENDERS.get((case.kernel, "triton"))
        for dtype in choose.dtypes(case, selection) if contender else ():
            for mode in choose.modes(case, selection):
                name = f"{case.kernel}/{case.name}/{dtype}/{mode}"
                if name in before:
                    say(f"{name}: tuned before")
                    continue
                if pace.over():
                    say(f"{name}: the deadline is over")
                    continue
                if why := choose.unsupported_case(case, selection.device) or choose.unsupported(
                    contender, case, dtype, selection.device, mode == "fwdbwd"
                ):
                    say(f"{name}: {why}")
                    continue
                say(name)
                found = tune.tune(tune.Bench(run, case, dtype, mode, contender), arguments.rounds, say, pace.over)
                tuned += keep(found, arguments.write)
                if arguments.json and not pace.over():
                    _append(arguments.json, name, found)
    if not tuned:
        return exits.OK if before else exits.NOTHING_MEASURED
    print(tables.align([HEADER, *map(cells, tuned)]))
    return exits.INCONCLUSIVE if pace.over() else exits.OK


def _finished(path: Path | None) -> set[str]:
    """Names of the results that the file holds."""
    return {json.loads(line)["tuned"] for line in path.read_text().splitlines()} if path and path.exists() else set()


def _append(path: Path, name: str, found: list[tune.Tuned]) -> None:
    rows = [
        {"op": item.op, "before": item.before, "best": item.best.row, "trials": [_trial(one) for one in item.trials]}
        for item in found
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"tuned": name, "rows": rows}) + "\n")


def _trial(trial: tune.Trial) -> dict:
    """Return a tile and its seconds, or why it can't be used."""
    from ..measure import tune

    return {"tile": tune.tile_text(trial.row)} | (
        {"reason": trial.reason} if trial.seconds is None else {"seconds": trial.seconds}
    )


def execute_static(arguments: argparse.Namespace) -> int:
    from retro_kernels.compile import configs

    calls.refuse_interpreter()
    if not arguments.kernel or not arguments.case:
        raise exits.UsageError("--static: name a --kernel and a shipped --case")
    from ..static import tiles

    machine, pace, tuned, before = (
        options.machine(arguments),
        Pace([], arguments.deadline),
        [],
        _finished(arguments.json),
    )
    for op, case, dtype in itertools.product(arguments.kernel, arguments.case, arguments.dtype or ("bfloat16",)):
        name = f"{op}/{case}/{dtype}/{machine.name}"
        if name in before:
            say(f"{name}: tuned before")
            continue
        if not tiles.rows_of(op, case, dtype, machine.arch):
            raise exits.UsageError(f"{op}: no shipped case {case} in {dtype}")
        found = []
        for item in tiles.tune(
            op,
            case,
            dtype,
            machine,
            rounds=arguments.rounds,
            kernels=arguments.row,
            tiles=arguments.tiles,
            say=say,
            over=pace.over,
        ):
            found.append(item)
            if arguments.write and item.best.row != item.before:
                configs.keep(op, item.before, {**item.best.row, "predicted": True})
        tuned += found
        if arguments.json and not pace.over():
            _append(arguments.json, name, found)
    if not tuned:
        return exits.OK if before else exits.NOTHING_MEASURED
    print(tables.align([HEADER, *map(cells, tuned)]))
    print(f"predicted for one {machine.name}, not measured")
    return exits.INCONCLUSIVE if pace.over() else exits.OK


def keep(tuned: list[tune.Tuned], write: bool) -> list[tune.Tuned]:
    from retro_kernels.compile import configs

    for item in tuned if write else ():
        if item.best.row != item.before:
            measured = {name: value for name, value in item.best.row.items() if name != "predicted"}
            configs.keep(item.op, item.before, measured)
    return tuned


def cells(item) -> tuple[str, ...]:
    from ..measure import tune

    row, first = item.before, item.trials[0]
    where = f"sm_{row['arch']} {row['bytes']} bytes, width {row['width']}"
    times = (tune.tile_text(row), _duration(first), tune.tile_text(item.best.row), _duration(item.best))
    unfit = sum(trial.status != "ok" for trial in item.trials)
    return (f"{item.op} {row['kernel']}", where, *times, str(len(item.trials)), str(unfit))


def _duration(trial: tune.Trial) -> str:
    return "-" if trial.seconds is None else summary.duration(trial.seconds)
