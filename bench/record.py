"""The record of one measurement: one JSON object a line, append-only. A missing value is null, never 0.

`FIELDS` is the schema; `validate` holds a record to it, and nothing is written that fails. Readers get records of any
version they know; an unknown version is an error, not a guess.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 2
STATUSES = ("ok", "numerics_fail", "oom", "unsupported", "error")
NUMBER, TEXT, OBJECT, LIST, BOOL = (int, float), (str,), (dict,), (list,), (bool,)

#: field -> (types, may be null)
FIELDS: dict[str, tuple[tuple[type, ...], bool]] = {
    "schema": ((int,), False),
    "run": (TEXT, False),  # one id per invocation: records of one run were measured side by side
    "at": (TEXT, False),  # UTC, ISO 8601
    "id": (TEXT, False),  # kernel/backend/case/dtype/mode
    "kernel": (TEXT, False),
    "backend": (TEXT, False),  # a backend of retro_kernels, or a baseline
    "role": (TEXT, False),  # kernel | reference | baseline
    "dtype": (TEXT, False),
    "mode": (TEXT, False),  # fwd | fwdbwd | decode | check | static
    "status": (TEXT, False),
    "reason": (TEXT, True),  # why the status is not ok
    "git": (OBJECT, False),  # sha, dirty
    "environment": (OBJECT, False),
    "device": (OBJECT, False),
    "ceilings": (OBJECT, True),  # bytes_per_s, flops_per_s by type
    "case": (OBJECT, False),  # name, shape, options, extras, source
    "seed": ((int,), True),
    "numerics": (OBJECT, True),  # passed, checked, tensors
    "time": (OBJECT, True),  # samples in seconds, minimum, median, p10, p90, method
    "work": (OBJECT, True),  # flops, bytes
    "roofline": (OBJECT, True),  # floor_s, bound, fraction
    "speedup": (OBJECT, True),  # baseline -> its time over this one's
    "memory": (OBJECT, True),  # peak_extra_bytes
    "launches": ((int,), True),
    "counters": (OBJECT, True),  # instructions, isa, tool, threads; new in schema 2
    "static": (OBJECT, True),
}
REQUIRED_INSIDE = {
    "case": ("name", "shape"),
    "git": ("sha", "dirty"),
    "numerics": ("passed", "checked", "tensors"),
    "time": ("samples", "minimum", "median", "method"),
    "work": ("flops", "bytes"),
    "roofline": ("floor_s", "bound", "fraction"),
}


class BadRecord(ValueError):
    """A line that is no record, or a record that breaks the schema."""


def new_run() -> str:
    return uuid.uuid4().hex[:12]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def identity(kernel: str, backend: str, case: str, dtype: str, mode: str) -> str:
    return "/".join((kernel, backend, case, dtype, mode))


def validate(record: Any) -> list[str]:
    """What is wrong with `record`; empty if nothing is."""
    if not isinstance(record, dict):
        return [f"a record is an object; got {type(record).__name__}"]
    wrong = [f"{name}: missing" for name in FIELDS if name not in record]
    wrong += [f"{name}: not a field of the schema" for name in record if name not in FIELDS]
    for name, (types, nullable) in FIELDS.items():
        if name not in record:
            continue
        value = record[name]
        if value is None:
            wrong += [] if nullable else [f"{name}: null"]
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wrong.append(f"{name}: expected {types[0].__name__}; got {type(value).__name__}")
    return wrong or _meaning(record) + [f"{path}: not a finite number" for path in _not_finite(record, "")]


def _meaning(record: dict[str, Any]) -> list[str]:
    """What the types can't say; only for a record whose fields are all there."""
    wrong = [] if record["schema"] == SCHEMA else [f"schema: expected {SCHEMA}; got {record['schema']}"]
    if record["status"] not in STATUSES:
        wrong.append(f"status: expected one of {', '.join(STATUSES)}; got {record['status']!r}")
    if record["status"] != "ok" and not record["reason"]:
        wrong.append("reason: a status other than ok needs one")
    for name, keys in REQUIRED_INSIDE.items():
        if record[name] is not None:
            wrong += [f"{name}.{key}: missing" for key in keys if key not in record[name]]
    if wrong:
        return wrong
    expected = identity(record["kernel"], record["backend"], record["case"]["name"], record["dtype"], record["mode"])
    if record["id"] != expected:
        wrong.append(f"id: expected {expected}; got {record['id']}")
    if record["time"] is not None:
        if record["status"] != "ok" or (record["numerics"] is not None and not record["numerics"]["passed"]):
            wrong.append("time: only a case that passed its check is timed")
        if not record["time"]["samples"] or min(record["time"]["samples"]) <= 0:
            wrong.append("time.samples: expected positive seconds")
    return wrong


def _not_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path.lstrip(".")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _not_finite(inner, path)


class Writer:
    """Appends records to a JSON-lines file: each is one write, so an interrupted run leaves whole lines only."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)

    def write(self, record: dict[str, Any]) -> None:
        wrong = validate(record)
        if wrong:
            raise BadRecord(f"{record.get('id')}: {'; '.join(wrong)}")
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _drop_torn_line(path: Path) -> None:
    """A process killed inside a write leaves a line without its end; it is cut off before anything is appended."""
    if not path.exists():
        return
    with open(path, "rb+") as f:
        data = f.read()
        if data and not data.endswith(b"\n"):
            f.truncate(data.rfind(b"\n") + 1)


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; a torn last line is left out. Raises BadRecord for anything else that is wrong."""
    records = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as e:
            if number == len(lines):
                break
            raise BadRecord(f"{path}:{number}: {e}") from None
        record = _upgraded(record)
        wrong = validate(record)
        if wrong:
            raise BadRecord(f"{path}:{number}: {'; '.join(wrong)}")
        records.append(record)
    return records


def _upgraded(record: Any) -> Any:
    """A record of schema 1 as one of schema 2."""
    if isinstance(record, dict) and record.get("schema") == 1 and "counters" not in record:
        return record | {"schema": SCHEMA, "counters": None}
    return record


def latest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last record of every id."""
    return {record["id"]: record for record in records}
