"""The record of one measurement, a JSON object in a line of a file. A missing value is null, never 0.

`FIELDS` is the schema. The writer validates each record, and the reader also accepts records of schema 2. Before its
records a run writes one line {"schema", "run", "requested"} with the ids that it is going to measure, so that a file of
an interrupted run shows what is missing. A run may write several records of one id, of which the last counts.
"""

import json
import math
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
NUMBER, TEXT, OBJECT, LIST, BOOL = (int, float), (str,), (dict,), (list,), (bool,)

#: field -> (types, may be null)
FIELDS: dict[str, tuple[tuple[type, ...], bool]] = {
    "schema": ((int,), False),
    "run": (TEXT, False),  # one id per invocation: records of one run were measured side by side
    "at": (TEXT, False),  # UTC, ISO 8601
    "id": (TEXT, False),  # op/backend/case/dtype/mode
    "op": (TEXT, False),
    "backend": (TEXT, False),  # a backend of retro_kernels, or a baseline
    "role": (TEXT, False),  # ours | reference | baseline
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
    "counters": (OBJECT, True),  # of `profile --stages`: "case" and "in cache", each with seconds and flops by stage
    "static": (OBJECT, True),
}
#: fields of results: null in the record of a case that did not run
RESULTS = tuple(FIELDS)[tuple(FIELDS).index("numerics") :]


def _by_path(paths: dict[tuple[tuple[type, ...], bool], str]) -> dict[str, tuple[tuple[type, ...], bool]]:
    return {path: kind for kind, text in paths.items() for path in text.split()}


#: path -> (types, may be null) of values inside the objects; * stands for every key or position
INSIDE = _by_path(
    {
        (TEXT, False): "case.name numerics.checked time.method.clock",
        (TEXT, True): "git.sha roofline.bound",
        (BOOL, False): "numerics.passed numerics.tensors.*.passed",
        (BOOL, True): "git.dirty",
        (LIST, False): "time.samples",
        (OBJECT, False): "ceilings.flops_per_s case.shape numerics.tensors numerics.tensors.* time.method",
        (NUMBER, False): "ceilings.bytes_per_s numerics.tensors.*.limit time.samples.* time.minimum time.median "
        "work.flops work.bytes speedup.* memory.peak_extra_bytes",
        (NUMBER, True): "ceilings.flops_per_s.* numerics.tensors.*.frobenius roofline.floor_s roofline.fraction "
        "static.stack_bytes static.blocks_per_sm static.tensor_instructions static.async_copies "
        "static.loop_issue_slots static.loop_tensor_instructions",
    }
)
#: the same for values that a record may lack
OPTIONAL = _by_path(
    {
        (TEXT, True): "environment.torch environment.triton device.name static.kernel static.config",
        ((int,), True): "environment.threads",
        (NUMBER, False): "time.p10 time.p90",
        (NUMBER, True): "time.host_s static.registers static.shared_static_bytes static.shared_dynamic_bytes "
        "static.loop_cycles_at_least",
    }
)
#: values above 0
POSITIVE = ("time.minimum", "time.median", "time.p10", "time.p90", "speedup.*")
POSITIVE += ("ceilings.bytes_per_s", "ceilings.flops_per_s.*")


class BadRecord(ValueError):
    """Raised for a line that is not a record, or for a record that breaks the schema."""


def new_run() -> str:
    return uuid.uuid4().hex[:12]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def identity(op: str, backend: str, case: str, dtype: str, mode: str) -> str:
    return "/".join((op, backend, case, dtype, mode))


def validate(record: Any) -> list[str]:
    """List the faults of `record`; empty if it is valid."""
    if not isinstance(record, dict):
        return [f"a record is an object; got {type(record).__name__}"]
    if type(record.get("schema")) is int and record["schema"] != SCHEMA:
        return [f"schema: expected {SCHEMA}; got {record['schema']}"]
    wrong = [f"{name}: missing" for name in FIELDS if name not in record]
    wrong += [f"{name}: not a field of the schema" for name in record if name not in FIELDS]
    for name, (types, nullable) in FIELDS.items():
        if name in record:
            wrong += _typed(name, record[name], types, nullable)
    infinite = (f"{path}: not a finite number" for path in _not_finite(record, ""))
    return wrong or _inside(record) or [*_meaning(record), *infinite]


def _typed(path: str, value: Any, types: tuple[type, ...], nullable: bool) -> list[str]:
    if value is None:
        return [] if nullable else [f"{path}: null"]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return [f"{path}: expected {types[0].__name__}; got {type(value).__name__}"]
    return []


def _inside(record: dict[str, Any]) -> list[str]:
    """List keys inside the objects that are missing or of another type."""
    wrong = []
    for pattern in INSIDE:
        parent, _, key = pattern.rpartition(".")
        sections = [(path, value) for path, value in _reach(record, parent) if isinstance(value, dict)]
        wrong += [f"{path}.{key}: missing" for path, value in sections if key not in ("*", *value)]
    for pattern, (types, nullable) in (INSIDE | OPTIONAL).items():
        for path, value in _reach(record, pattern):
            wrong += _typed(path, value, types, nullable)
    return wrong


def _reach(record: dict[str, Any], pattern: str) -> list[tuple[str, Any]]:
    """Return (path, value) of everything in the record that a dotted pattern names."""
    reached: list[tuple[str, Any]] = [("", record)]
    for part in pattern.split("."):
        deeper = []
        for path, value in reached:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            deeper += [(f"{path}.{key}".lstrip("."), inner) for key, inner in items if part in ("*", key)]
        reached = deeper
    return reached


def _meaning(record: dict[str, Any]) -> list[str]:
    """List faults that types can't show. The record must have all fields."""
    wrong = []
    if record["status"] not in STATUSES:
        wrong.append(f"status: expected one of {', '.join(STATUSES)}; got {record['status']!r}")
    if record["status"] != "ok" and not record["reason"]:
        wrong.append("reason: a status other than ok needs one")
    if wrong:
        return wrong
    expected = identity(record["op"], record["backend"], record["case"]["name"], record["dtype"], record["mode"])
    if record["id"] != expected:
        wrong.append(f"id: expected {expected}; got {record['id']}")
    if record["time"] is not None:
        if record["status"] != "ok" or (record["numerics"] is not None and not record["numerics"]["passed"]):
            wrong.append("time: only a case that passed its check is timed")
        if not record["time"]["samples"] or min(record["time"]["samples"]) <= 0:
            wrong.append("time.samples: expected positive seconds")
    for name in POSITIVE:
        small = [(path, v) for path, v in _reach(record, name) if v is not None and v <= 0]
        wrong += [f"{path}: expected a number above 0; got {v}" for path, v in small]
    work = {name: record["work"][name] for name in ("flops", "bytes")} if record["work"] else {}
    return wrong + [f"work.{k}: expected a number of at least 0; got {v}" for k, v in work.items() if v < 0]


def _not_finite(value: Any, path: str) -> Iterator[str]:
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > GREATEST):
        yield path.lstrip(".")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _not_finite(inner, path)


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
        if self.path is None:
            return
        line = json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


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
    wrong = [f"{name}: not a field of a request" for name in line if name not in ("schema", "run", "requested")]
    wrong += [] if line.get("schema") == SCHEMA else [f"schema: expected {SCHEMA}; got {line.get('schema')}"]
    ids = line["requested"]
    if not isinstance(line.get("run"), str):
        wrong.append("run: expected a text")
    if not isinstance(ids, list) or not all(isinstance(one, str) and one.count("/") == 4 for one in ids):
        wrong.append("requested: expected a list of ids")
    return wrong


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
