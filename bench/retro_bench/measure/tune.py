"""Find the fastest tile on this GPU: the committed one against its neighbours, each checked before it is timed.

A call takes one row of `retro_kernels/ops/<op>/tiles.json` for each of its kernels. The rows are tuned one after the
other, with the best of the earlier rows in place. A search steps to the fastest neighbour until none is faster.
"""

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch

import retro_kernels
from retro_kernels.compile import tiles

from ..check import numerics, oracle
from ..registry import CONTENDERS, OPERATORS, Case, Contender
from . import choose, runner, samples, timing

#: numbers of a row that a step halves or doubles, or counts up or down, with their bounds
_DOUBLED = {"block_m": (16, 256), "block_n": (16, 256), "block_d": (8, 128), "num_warps": (1, 16)}
_COUNTED = {"num_stages": (1, 5)}
_MOST_CHANGES = 2  # numbers in which a neighbour differs
Say = Callable[[str], None]
LEAST_GAIN = 0.02  # share of the call's time that a tile must save to be kept: less is noise


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row instead of the committed row: the time of the whole call, or why the row is not usable."""

    row: dict
    status: str  # ok | numerics | error
    seconds: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A row of a tile table, and the trials of the tiles that could replace it. Seconds are measured, or estimated by
    `static.tiles`.
    """

    op: str
    before: dict
    trials: list[Trial]  # the committed row first
    best: Trial


def neighbours(row: dict) -> list[dict]:
    """Return the rows that differ from this one by a step in one number or two."""
    steps = list(_steps(row))
    several = (itertools.combinations(steps, count) for count in range(1, _MOST_CHANGES + 1))
    chosen = itertools.chain.from_iterable(several)
    return [{**row, **dict(changes)} for changes in chosen if len(dict(changes)) == len(changes)]


def _steps(row: dict) -> Iterator[tuple[str, int]]:
    for name, (least, most) in _DOUBLED.items():
        if name == "block_m" and "block_d" in row:
            continue  # topk_chunks chooses among its rows by their block_m
        if name in row:
            yield from ((name, value) for value in (row[name] // 2, row[name] * 2) if least <= value <= most)
    for name, (least, most) in _COUNTED.items():
        yield from ((name, value) for value in (row[name] - 1, row[name] + 1) if least <= value <= most)


@contextlib.contextmanager
def in_place(op: str, changes: list[tuple[dict, dict]]) -> Iterator[None]:
    """Replace each `old` row of the op's table by its `new` one, for `changes` of (old, new)."""
    rows = list(tiles.table(op))
    for old, new in changes:
        rows[rows.index(old)] = new
    with tiles.replaced(op, tuple(rows)):
        yield


class Bench:
    """Tuning of one case, type and mode. Inputs, float64 answer and eager's errors are made once for all trials."""

    def __init__(self, run: runner.Run, case: Case, dtype: str, mode: str, contender: Contender):
        self.run, self.case, self.mode, self.contender, self.dtype = run, case, mode, contender, dtype
        seed = secrets.randbits(31)
        self.arguments: dict[str, Any] = case.make(seed, run.device, getattr(torch, dtype))
        self.operator = OPERATORS[case.op]
        self.truth = oracle.solve(self.operator, case, self.arguments, seed, mode == "fwdbwd", run.oracle_share)
        eager = CONTENDERS[case.op, choose.YARDSTICK]
        self.yardstick = numerics.errors(self.operator, eager, self.arguments, self.truth)

    def call(self) -> Callable[[], Any]:
        return runner.step(self.contender, self.case, self.arguments, self.mode == "fwdbwd")

    def rows(self) -> list[tuple[str, dict]]:
        """Return (op, row) of every tile that the call looks up."""
        with tiles.watched() as seen:
            self.call()()
        return seen

    def fault(self) -> tuple[str, str] | None:
        """Return status and reason if the call fails or is wrong with the table as it is."""
        try:
            measured = numerics.errors(self.operator, self.contender, self.arguments, self.truth)
        except Exception as e:  # raised by a tile that doesn't fit the chip
            return "error", f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        verdict = numerics.judge(measured, self.yardstick, self.dtype, self.truth.checked)
        return None if verdict.passed else ("numerics", verdict.complaint())

    def trials(self, op: str, kept: list[tuple[dict, dict]], old: dict, rows: list[dict]) -> list[Trial]:
        """Check the op with each of `rows` instead of `old`. Then time the rows with right results, in alternation.

        The changes of other rows that were `kept` stay in the table.
        """
        trials: dict[int, Trial] = {}
        calls: dict[str, Callable[[], Any]] = {}
        with contextlib.suppress(RuntimeError, ValueError):  # `fault` meets the same error, and reports it
            retro_kernels.warm_up(*[self._with(op, [*kept, (old, row)]) for row in rows])
        for i, row in enumerate(rows):
            with in_place(op, [*kept, (old, row)]):
                fault = self.fault()
            if fault:
                trials[i] = Trial(row, fault[0], reason=fault[1])
            else:
                calls[str(i)] = self._with(op, [*kept, (old, row)])
        for name, outcome in timing.measure(calls, self.run.device, self.run.effort).items():
            row = rows[int(name)]
            if isinstance(outcome, Exception):
                trials[int(name)] = Trial(row, "error", reason=str(outcome))
            else:
                trials[int(name)] = Trial(row, "ok", samples.estimate(outcome))
        return [trials[i] for i in sorted(trials)]

    def _with(self, op: str, changes: list[tuple[dict, dict]]) -> Callable[[], Any]:
        call = self.call()

        def run() -> Any:
            with in_place(op, changes):
                return call()

        return run


def tune(bench: Bench, rounds: int, say: Say, over: Callable[[], bool] = lambda: False) -> list[Tuned]:
    """Tune the rows of the call by at most `rounds` steps each, until `over()`. Raises ValueError if a row fails."""
    tuned: list[Tuned] = []
    for op, row in bench.rows():
        if over():
            break
        kept = [(t.before, t.best.row) for t in tuned if t.op == op and t.best.row != t.before]

        def trials(rows: list[dict], op=op, row=row, kept=kept) -> list[Trial]:
            say(f"{op} {row['kernel']}: {len(rows) - 1} tiles around {tile_text(rows[0])}")
            # the centre runs again next to its neighbours, because times of different rounds are not comparable
            found = bench.trials(op, kept, row, rows)
            if found[0].status != "ok":
                raise ValueError(f"{op} {row['kernel']} {tile_text(rows[0])}: {found[0].status}: {found[0].reason}")
            return found

        tuned.append(Tuned(op, row, *search(row, trials, rounds, LEAST_GAIN)))
    return tuned


def search(
    row: dict, trials: Callable[[list[dict]], list[Trial]], rounds: int, gain: float
) -> tuple[list[Trial], Trial]:
    """Step from a row to the fastest of its neighbours, at most `rounds` times. Return all trials and the best.

    trials: of [the centre, *new rows]. A new row may lack a trial. gain: share of the centre's time that a tile must
    save.
    """
    tried, found, best = [row], [], None
    for _ in range(rounds):
        centre = row if best is None else best.row
        new = [other for other in neighbours(centre) if other not in tried]
        tried += new
        first, *others = trials([centre, *new])
        found += others if found else [first, *others]
        usable = [t for t in others if t.status == "ok"]
        faster = [t for t in usable if first.seconds is None or t.seconds < (1 - gain) * first.seconds]
        best = min(faster, key=lambda t: t.seconds, default=first)
        if best is first:
            break
    return found, best


def tile_text(row: dict) -> str:
    """Write the numbers of a tile in short: `m64 n32 w4 s2`."""
    letters = {"block_m": "m", "block_n": "n", "block_d": "d"}
    letters |= {"num_warps": "w", "num_stages": "s", "max_registers": "r"}
    return " ".join(f"{letter}{row[name]}" for name, letter in letters.items() if name in row)
