"""The record of one measurement, a JSON object in a line of a file. A missing value is null, never 0.

`FIELDS` is the schema. The writer validates each record, and the reader also accepts records of schema 2. Before its
records a run writes one line {"schema", "run", "requested"} with the ids that it is going to measure, so that a file of
an interrupted run shows what is missing. A run may write several records of one id, of which the last counts.
"""

import json
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 3
GREATEST = 10**300  # about the greatest integer that a float can hold
FAILED = ("numerics_fail", "oom", "error")
STATUSES = ("ok", "unsupported", *FAILED)
#: kind of a value -> its types. A rate is above 0, an amount at least 0.
KINDS = {"int": int, "str": str, "bool": bool, "dict": dict}
KINDS |= dict.fromkeys(("number", "rate", "amount"), (int, float))
_MISSABLE = "may be missing: "

#: field -> form: a kind ("int?": or null), {key: form} with * for every key, or [form] for a list.
#: An object in a tuple may be null.
FIELDS: dict[str, Any] = {
    "schema": "int",
    "run": "str",  # one id per invocation: records of one run were measured side by side
    "at": "str",  # UTC, ISO 8601
    "id": "str",  # op/backend/case/dtype/mode
    "op": "str",
    "backend": "str",  # a backend of retro_kernels, or a baseline
    "role": "str",  # ours | reference | baseline
    "dtype": "str",
    "mode": "str",  # fwd | fwdbwd | decode | check | static
    "status": "str",
    "reason": "str?",  # why the status is not ok
    "git": {"sha": "str?", "dirty": "bool?"},
    "environment": {_MISSABLE + "torch": "str?", _MISSABLE + "triton": "str?", _MISSABLE + "threads": "int?"},
    "device": {_MISSABLE + "name": "str?"},
    "ceilings": ({"bytes_per_s": "rate", "flops_per_s": {"*": "rate?"}},),
    "case": {"name": "str", "shape": "dict"},  # and options, extras, source
    "seed": "int?",
    "numerics": (
        {
            "passed": "bool",
            "checked": "str",
            "tensors": {"*": {"passed": "bool", "limit": "number", "frobenius": "number?"}},
        },
    ),
    "time": (  # in seconds
        {
            "samples": ["rate"],
            **{"minimum": "rate", "median": "rate", _MISSABLE + "p10": "rate", _MISSABLE + "p90": "rate"},
            _MISSABLE + "host_s": "number?",
            "method": {"clock": "str"},
        },
    ),
    "work": ({"flops": "amount", "bytes": "amount"},),
    "roofline": ({"bound": "str?", "floor_s": "number?", "fraction": "number?"},),
    "speedup": ({"*": "rate"},),  # baseline -> its time over this one's
    "memory": ({"peak_extra_bytes": "number"},),
    "launches": "int?",
    "counters": "dict?",  # of `profile --stages`: "case" and "in cache", each with seconds and flops by stage
    "static": (
        dict.fromkeys(("stack_bytes", "blocks_per_sm", "tensor_instructions", "async_copies"), "number?")
        | dict.fromkeys(("loop_issue_slots", "loop_tensor_instructions"), "number?")
        | {_MISSABLE + name: "str?" for name in ("kernel", "config")}
        | {_MISSABLE + name: "number?" for name in ("registers", "shared_static_bytes", "shared_dynamic_bytes")}
        | {_MISSABLE + "loop_cycles_at_least": "number?"},
    ),
}
#: form of the line that a run writes before its records
REQUEST = {"schema": "int", "run": "str", "requested": ["str"]}


class BadRecord(ValueError):
    """Raised for a line that is not a record, or for a record that breaks the schema."""


def new_run() -> str:
    return uuid.uuid4().hex[:12]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def identity(op: str, backend: str, case: str, dtype: str, mode: str) -> str:
    return "/".join((op, backend, case, dtype, mode))


def blank(**fields: Any) -> dict[str, Any]:
    """Return a record with these fields, the time of now and its id. The others are null."""
    id_ = identity(fields["op"], fields["backend"], fields["case"]["name"], fields["dtype"], fields["mode"])
    return dict.fromkeys(FIELDS) | {"schema": SCHEMA, "at": now(), "id": id_} | fields


def validate(record: Any) -> list[str]:
    """List the faults of `record`; empty if it is valid."""
    if not isinstance(record, dict):
        return [f"a record is an object; got {type(record).__name__}"]
    if type(record.get("schema")) is int and record["schema"] != SCHEMA:
        return [f"schema: expected {SCHEMA}; got {record['schema']}"]
    return _violations(record, FIELDS) or list(_meaning(record))


def _violations(line: dict[str, Any], form: dict[str, Any]) -> list[str]:
    """List the fields that a line of a file has and must not have, then the faults of the others."""
    return [f"{name}: not a field of the schema" for name in line if name not in form] + list(_faults(line, form, ""))


def _faults(value: Any, form: Any, path: str) -> Iterator[str]:
    """Yield the faults of a value that does not have its form."""
    if isinstance(form, (str, tuple)) and value is None:
        if not isinstance(form, tuple) and not form.endswith("?"):
            yield f"{path}: null"
        return
    form = form[0] if isinstance(form, tuple) else form
    types = KINDS[form.rstrip("?")] if isinstance(form, str) else type(form)
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        kind = form.rstrip("?") if isinstance(form, str) else types.__name__
        yield f"{path}: expected {kind}; got {type(value).__name__}"
    elif isinstance(value, (int, float)):
        if not -GREATEST <= value <= GREATEST:  # NaN included
            yield f"{path}: not a finite number"
        elif form.startswith("rate") and value <= 0:
            yield f"{path}: expected a number above 0; got {value}"
        elif form.startswith("amount") and value < 0:
            yield f"{path}: expected a number of at least 0; got {value}"
    elif isinstance(form, list):
        for number, inner in enumerate(value):
            yield from _faults(inner, form[0], f"{path}.{number}")
    elif isinstance(form, dict):
        for name, inner in form.items():
            key = name.removeprefix(_MISSABLE)
            if key not in ("*", *value) and key == name:
                yield f"{path}.{key}: missing".lstrip(".")
            for found in value if key == "*" else {key} & value.keys():
                yield from _faults(value[found], inner, f"{path}.{found}".lstrip("."))


def _meaning(record: dict[str, Any]) -> Iterator[str]:
    """Yield faults that forms can't show."""
    if record["status"] not in STATUSES:
        yield f"status: expected one of {', '.join(STATUSES)}; got {record['status']!r}"
    if record["status"] != "ok" and not record["reason"]:
        yield "reason: a status other than ok needs one"
    expected = identity(record["op"], record["backend"], record["case"]["name"], record["dtype"], record["mode"])
    if record["id"] != expected:
        yield f"id: expected {expected}; got {record['id']}"
    passed = record["status"] == "ok" and (record["numerics"] is None or record["numerics"]["passed"])
    if record["time"] is not None and not passed:
        yield "time: only a case that passed its check is timed"
    if record["time"] is not None and not record["time"]["samples"]:
        yield "time.samples: empty"


class Writer:
    """Appends records to a JSON-lines file, or only checks them. Each is one write, so whole lines survive a crash."""

    def __init__(self, path: Path | None):
        self.path = path
        self.requested: list[str] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)

    def request(self, run: str, ids: list[str]) -> None:
        """Note the ids that the run is going to measure."""
        self.requested += ids
        self._append({"schema": SCHEMA, "run": run, "requested": ids})

    def write(self, record: dict[str, Any]) -> None:
        if wrong := validate(record):
            raise BadRecord(f"{record.get('id')}: {'; '.join(wrong)}")
        self._append(record)

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            append(self.path, line)


def append(path: Path, line: dict[str, Any]) -> None:
    """Append an object to a file of JSON lines, in one write."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n").encode())


def replace(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file's records of the same run and id by one each. The file is whole at any moment."""
    new = {(one["run"], one["id"]): one for one in records}
    lines: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(_lines(path)):
        key = (line["run"], line.get("id"))
        lines[key if key in new else number] = new.get(key, line)
    beside = path.with_name(path.name + ".new")
    beside.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines.values()))
    os.replace(beside, path)


def torn(path: Path) -> bool:
    """Whether the last line is incomplete, because its process was killed while it wrote."""
    last = path.read_bytes().rpartition(b"\n")[2]
    try:
        return bool(last.strip()) and not isinstance(json.loads(last), dict)
    except ValueError:
        return True


def _drop_torn_line(path: Path) -> None:
    """Cut off an incomplete last line. A whole one gets its end of line."""
    if not path.exists():
        return
    whole = not torn(path)
    with open(path, "rb+") as f:
        data = f.read()
        if data and not data.endswith(b"\n"):
            f.write(b"\n") if whole else f.truncate(data.rfind(b"\n") + 1)


def read(path: Path) -> list[dict[str, Any]]:
    """Read all records of a file. An incomplete last line is left out. Raises BadRecord for any other fault."""
    return [line for line in _lines(path) if "requested" not in line]


def requested(path: Path) -> list[str]:
    """Return the ids that the runs of a file were going to measure. Raises BadRecord as `read` does."""
    return list(dict.fromkeys(one for line in _lines(path) for one in line.get("requested", ())))


def pending(one: dict[str, Any]) -> bool:
    """Whether a record says only that a contender passed its check. Its time is written in a later record."""
    return one["status"] == "ok" and one["mode"] not in ("check", "static") and not one["time"]


def left(path: Path) -> list[str]:
    """Return the ids that the last run of a file requested and did not record."""
    asked, made = [], set()
    for line in _lines(path):
        if "requested" in line:
            asked, made = line["requested"], set()
        elif not pending(line):
            made.add(line["id"])
    return [one for one in asked if one not in made]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each line of a file, parsed and validated."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise BadRecord(f"{path}: no text: {e}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _renamed(json.loads(line))
            wrong = _unreadable(found) if isinstance(found, dict) and "requested" in found else validate(found)
        except json.JSONDecodeError as e:
            if number == len(lines):
                break
            raise BadRecord(f"{path}:{number}: {e}") from None
        except (ValueError, RecursionError) as e:  # a number of thousands of digits, or objects nested as deep
            raise BadRecord(f"{path}:{number}: {type(e).__name__}: {e}") from None
        if wrong:
            raise BadRecord(f"{path}:{number}: {'; '.join(wrong)}")
        yield found


def _renamed(line: Any) -> Any:
    """Return a line of schema 2 under the names of schema 3: the field kernel is op, and the role kernel is ours."""
    if not isinstance(line, dict) or line.get("schema") != 2:
        return line
    renamed = {"op" if name == "kernel" else name: value for name, value in line.items()} | {"schema": SCHEMA}
    return renamed | {"role": "ours"} if renamed.get("role") == "kernel" else renamed


def _unreadable(line: dict[str, Any]) -> list[str]:
    """List the faults of a line of requested ids."""
    wrong = [] if line.get("schema") == SCHEMA else [f"schema: expected {SCHEMA}; got {line.get('schema')}"]
    wrong = wrong or _violations(line, REQUEST)
    return wrong or [f"requested: expected an id; got {one}" for one in line["requested"] if one.count("/") != 4]


def case_content(one: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a record's case: letters and sizes, options, and the inputs that were drawn."""
    case = one["case"]
    return {**case["shape"], **case.get("options", {}), **dict.fromkeys(case.get("extras", ()), "drawn")}


def case_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say what differs between two cases of one name; empty if nothing does. A record may hold the shape alone.

    >>> case_change({"case": {"shape": {"N": 8}}}, {"case": {"shape": {"N": 9}, "options": {"causal": True}}})
    'N: 9, was 8'
    """
    whole = all("options" in one["case"] for one in (old, new))
    was, now = (case_content(one) if whole else one["case"]["shape"] for one in (old, new))
    return differences(was, now)


def described(values: dict[str, Any]) -> dict[str, str]:
    """Describe arguments by their types and shapes: the name of a case alone proves nothing."""

    def text(value) -> str:
        if hasattr(value, "stride"):
            strides = "" if value.is_contiguous() else f" of strides {list(value.stride())}"
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{strides}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    return {name: text(value) for name, value in values.items()}


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in was | now if was.get(name) != now.get(name)]
    return "; ".join(f"{name}: {now.get(name, 'none')}, was {was.get(name, 'none')}" for name in names)


def latest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last record of every id."""
    return {record["id"]: record for record in records}
