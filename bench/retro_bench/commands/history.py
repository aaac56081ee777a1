"""keep records over commits, and find the commits that changed a time

`--record DIR` appends times of record files to DIR/history.jsonl. `--report DIR` prints a line for each case, with the
commits at which its time went to another level. Each machine has its own lines, and so has each content of a case
(shape, options, inputs).
"""

import argparse
from pathlib import Path

from ..records import machines, record
from ..report import changes, summary, tables
from . import exits, options, progress

NAME = "history.jsonl"
HEADER = ("measurement", "records", "first median", "last median", "drift", "changed at")
DRIFT = 1.05  # a greater one is reported even without a change point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with --record: records of `run` or `ab`")
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
    steps = [f"{_commit(rows[i])} {times[i] / times[i - 1]:.2f}x" for i in changes.points(times)]
    drift = changes.drift(times)
    more = ["drifts"] if drift > DRIFT and not steps else []
    ends = (summary.duration(times[0]), summary.duration(times[-1]))
    return (name, str(len(rows)), *ends, f"{drift:.2f}x", ", ".join(steps + more) or "-")


def _commit(record: dict) -> str:
    sha = record["git"]["sha"]
    return (sha[:9] + ("+" if record["git"]["dirty"] else "")) if sha else record["at"][:10]
