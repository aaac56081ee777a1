"""keep records over commits, and find the commits that changed a time

`--record DIR` appends times of record files to DIR/history.jsonl. `--report DIR` prints a line for each case, with the
commits at which its time went to another level. Each machine has its own lines, and so has each content of a case
(shape, options, inputs).
"""

import argparse
import itertools
import math
import statistics
from pathlib import Path

from ..records import machines, record
from ..report import summary, tables
from . import exits, options, progress

NAME = "history.jsonl"
HEADER = ("measurement", "records", "first median", "last median", "drift", "changed at")
DRIFT = 1.05  # a greater one is reported even without a change point
LEAST = 3  # least points of a level
SHIFT = 1.03  # least ratio of two levels
SIGMAS = 4.0  # least step between two levels, over the noise of their means
NOISE = 0.005  # least noise of one point
ENDS = 5  # points at either end that `drift` compares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with --record: records of `run`")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="DIR", help="append the files' times to the history in DIR")
    what.add_argument("--report", type=Path, metavar="DIR", help="show the history in DIR")


def execute(arguments: argparse.Namespace) -> int:
    if bool(arguments.files) != bool(arguments.record):
        raise exits.UsageError("history: expected FILE ... --record DIR, or --report DIR")
    if arguments.record:
        return _record(arguments.files, arguments.record)
    series = collected(options.records(arguments.report / NAME))
    if not series:
        raise exits.UsageError(f"--report {arguments.report}: nothing was timed")
    print(tables.align([HEADER, *(_line(name, rows) for (name, _), rows in series.items())]))
    return exits.OK


def _record(files: list[Path], folder: Path) -> int:
    """Append the records of `files` that the history lacks."""
    history = folder / NAME
    known = {(r["run"], r["id"], r["git"]["sha"]) for r in options.records(history)} if history.exists() else set()
    writer, count = record.Writer(history), 0
    for one in [one for path in files for one in options.records(path)]:
        key = (one["run"], one["id"], one["git"]["sha"])
        if one["time"] and one["role"] != "baseline" and key not in known:
            writer.write(one)
            known.add(key)
            count += 1
    print(f"{count} records added to {history}")
    return exits.OK if count else exits.NOTHING_MEASURED


def collected(records: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Group the timed records by (id, machine), oldest first. A case that changed gets a group per content."""
    series: dict[tuple[str, str, str], list[dict]] = {}
    contents: dict[str, set[str]] = {}
    for one in records:
        if one["time"] and one["role"] != "baseline":
            where = ", ".join(machines.identity(one).values())
            content = " ".join(f"{name}={value}" for name, value in record.case_content(one).items())
            contents.setdefault(one["id"], set()).add(content)
            series.setdefault((one["id"], where, content), []).append(one)
    for name in [name for name, several in contents.items() if len(several) > 1]:
        progress.say(f"{name}: {len(contents[name])} different cases had this name; each has its own line")
    return {
        (f"{name} {content}" if len(contents[name]) > 1 else name, where): sorted(rows, key=lambda r: r["at"])
        for (name, where, content), rows in sorted(series.items())
    }


def _line(name: str, rows: list[dict]) -> tuple[str, ...]:
    times = [one["time"]["median"] for one in rows]
    steps = [f"{_commit(rows[i])} {times[i] / times[i - 1]:.2f}x" for i in points(times)]
    moved = drift(times)
    more = ["drifts"] if moved > DRIFT and not steps else []
    ends = (summary.duration(times[0]), summary.duration(times[-1]))
    return (name, str(len(rows)), *ends, f"{moved:.2f}x", ", ".join(steps + more) or "-")


def _commit(record: dict) -> str:
    sha = record["git"]["sha"]
    return (sha[:9] + ("+" if record["git"]["dirty"] else "")) if sha else record["at"][:10]


def points(times: list[float]) -> list[int]:
    """Return the indices at which a new level begins, in order.

    >>> points([1.0, 1.01, 1.0, 1.01, 1.2, 1.21, 1.2, 1.21])
    [4]
    """
    logs = [math.log(t) for t in times]
    return sorted(_split(logs, 0, len(logs), _noise(logs)))


def drift(times: list[float]) -> float:
    """Return the ratio of the median of the last times to the median of the first: the sum of many small changes.

    >>> drift([1.0, 1.0, 1.1, 1.1])
    1.1
    """
    few = min(ENDS, max(len(times) // 2, 1))
    return round(statistics.median(times[-few:]) / statistics.median(times[:few]), 6)


def _noise(logs: list[float]) -> float:
    """Return the spread of one point, from the steps between adjacent points: few of them are changes."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return max(statistics.median(steps) / 0.954, NOISE) if steps else NOISE  # median |a - b| = 0.954 sigma


def _split(logs: list[float], first: int, last: int, noise: float) -> list[int]:
    best, where = 0.0, None
    for at in range(first + LEAST, last - LEAST + 1):
        step = abs(statistics.fmean(logs[at:last]) - statistics.fmean(logs[first:at]))
        sure = step / (noise * math.sqrt(1 / (at - first) + 1 / (last - at)))
        if step > math.log(SHIFT) and sure > max(best, SIGMAS):
            best, where = sure, at
    if where is None:
        return []
    return [where, *_split(logs, first, where, noise), *_split(logs, where, last, noise)]
