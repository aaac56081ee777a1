"""The schema of records: accepted records, refused records, and truncated files."""

import json
import os

import pytest

from retro_bench.measure import samples
from retro_bench.records import environment, record
from tests.bench.helpers import timed
from tests.refusals import refused


@pytest.fixture
def good():
    return timed("op", case="case", run="a")


def test_round_trip(good, tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    writer = record.Writer(path)
    writer.write(good)
    opened = len(os.listdir("/proc/self/fd"))
    writer.write(good)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert record.read(path) == [good, good]
    assert record.latest(record.read(path)) == {good["id"]: good}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"status": "fine"}, "status: expected one of"),
        ({"status": "oom", "time": None}, "reason: a status other than ok needs one"),
        ({"status": "numerics_fail", "reason": "out"}, "only a case that passed its check is timed"),
        ({"launches": "3"}, "launches: expected int; got str"),
        ({"launches": True}, "launches: expected int; got bool"),
        ({"op": None}, "op: null"),
        ({"id": "other"}, "id: expected op/cpu/case/float32/fwd"),
        ({"extra": 1}, "extra: not a field"),
        ({"schema": 99}, "schema: expected 3"),
        ({"work": {"flops": float("nan"), "bytes": 1.0}}, "work.flops: not a finite number"),
        ({"work": {"flops": 1.0}}, "work.bytes: missing"),
        (
            {"time": samples.summary([1.0], {"clock": "wall"}) | {"samples": [0.0]}},
            "expected a number above 0; got 0.0",
        ),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused(good, tmp_path, change, complaint):
    bad = good | change
    assert any(complaint in wrong for wrong in record.validate(bad)), record.validate(bad)
    refused(r"op/cpu|other", record.Writer(tmp_path / "a.jsonl").write, bad, error=record.BadRecord)
    assert not (tmp_path / "a.jsonl").exists()


def test_records_of_schema_2_are_read_under_their_new_names(good, tmp_path):
    """Schema 3 renamed the field kernel to op, and the role kernel to ours. A resumed file holds both."""
    old = {"kernel" if name == "op" else name: value for name, value in good.items()} | {"schema": 2, "role": "kernel"}
    path = tmp_path / "old.jsonl"
    asked = {"schema": 2, "run": "a", "requested": [good["id"]]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (asked, old)))
    record.Writer(path).write(good)
    assert record.read(path) == [good, good] and record.requested(path) == [good["id"]]
    path.write_text(json.dumps(old | {"schema": 1}))
    refused("schema: expected 3; got 1", record.read, path, error=record.BadRecord)
    assert record.read(environment.ROOT / "bench/results/cpu-zen5-2core-2026-11-23.jsonl")[1]["role"] == "ours"


def test_every_field_is_required(good):
    for name in record.FIELDS:
        assert record.validate({k: v for k, v in good.items() if k != name})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"requested": ["op/cpu"]}, "requested: expected an id; got op/cpu"),
        ({"requested": "op"}, "requested: expected list; got str"),
        ({"run": None}, "run: null"),
        ({"extra": 1}, "extra: not a field"),
        ({"schema": 99}, "schema: expected 3; got 99"),
    ],
)
def test_a_request_that_breaks_the_schema_is_refused(tmp_path, change, complaint):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"schema": record.SCHEMA, "run": "a", "requested": []} | change))
    refused(complaint, record.read, path, error=record.BadRecord)


def test_a_torn_line_in_the_middle_is_an_error(good, tmp_path):
    path = tmp_path / "a.jsonl"
    record.Writer(path).write(good)
    path.write_text('{"schema"\n' + path.read_text())
    refused(":1:", record.read, path, error=record.BadRecord)


def test_every_record_in_the_tree_is_named_by_a_page():
    """A table may leave out the common prefix of its records' names."""
    root = environment.ROOT
    text = "\n".join(page.read_text() for page in [root / "README.md", *(root / "docs").rglob("*.md")])
    records = sorted((root / "bench" / "results").glob("*.json*"))
    lost = [p.name for p in records if p.stem not in text and p.stem.removeprefix("cpu-zen5-2core-") not in text]
    assert records and not lost
