"""Range of a ratio over the kept records of one processor, because runs of one machine differ."""

import functools
from pathlib import Path
from typing import Any

from ..records import environment, record
from . import summary

KEPT = environment.ROOT / "bench" / "results"


def of(records: list[dict[str, Any]], folder: Path = KEPT) -> dict[str, tuple[float, float]]:
    """Return id -> lowest and highest ratio to the best baseline, over kept records of the same processor."""
    wanted, cases = {_processor(one) for one in records}, {one["id"]: one for one in records}
    ratios: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        kept = [one for one in timed(path) if _processor(one) in wanted]
        kept = [one for one in kept if one["id"] not in cases or not record.case_change(one, cases[one["id"]])]
        for name, ratio in of_run(kept).items():
            ratios.setdefault(name, []).append(ratio)
    return {name: (min(values), max(values)) for name, values in ratios.items() if len(values) > 1}


def of_run(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return id -> ratio to the best baseline in the records of one run."""
    rows = summary.rows(list(record.latest(records).values()))
    return {row.record["id"]: row.rival_speedup for row in rows if row.rival_speedup is not None}


def timed(path: Path) -> list[dict[str, Any]]:
    """Return the timed records of a file. A file of predictions in the same folder has none."""
    return _timed(path, path.stat().st_mtime_ns)


@functools.lru_cache(128)
def _timed(path: Path, changed: int) -> list[dict[str, Any]]:
    try:
        return [one for one in record.read(path) if one["time"]]
    except record.BadRecord:
        return []


def _processor(one: dict[str, Any]) -> tuple:
    caches = one["device"].get("caches") or {}  # generations of a processor share one name
    return one["device"].get("name"), tuple(one["environment"].get("isa") or ()), *sorted(caches.items())
