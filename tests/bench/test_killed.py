"""A run that is killed in the middle leaves a file that can be read and resumed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import retro_bench
from retro_bench.commands import exits, measuring
from retro_bench.measure import samples
from retro_bench.records import environment, record
from retro_bench.report import summary
from retro_bench.static import triton_kernels
from tests.bench.helpers import QUICK, wrong
from tests.conftest import INTERPRETER

#: a writer that pauses within each line, to be killed between two writes of one record
SLOW = """
import json, os, sys, time
from pathlib import Path
from retro_bench.records import record
path = Path(sys.argv[1])
writer = record.Writer(path)
good = json.loads(sys.stdin.read())
writer.write(good)
writer.write(good)
half = (json.dumps(good) + "\\n").encode()
with open(path, "ab", buffering=0) as f:
    f.write(half[: len(half) // 2])
    print("half", flush=True)
    time.sleep(60)
"""
RUN = ["run", "--device", "cpu", "--quiet", "--op", "leaky_average", "--backend", "reference", "--baselines", "none"]
RUN += ["--case", "mosaics", "--no-ceilings", "--dtype", "float32", "--samples", "1", "--seconds", "0"]
RUN += ["--threads", "1"]


@pytest.fixture
def finished(tiny, tmp_path):
    """A real record."""
    path = tmp_path / "good.jsonl"
    assert retro_bench.main(["check", *QUICK, "--backend", "reference", "--json", str(path)]) == exits.OK
    return record.read(path)[-1]


def test_a_kill_inside_a_write_costs_that_record_alone(finished, tmp_path):
    path = tmp_path / "a.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=environment.ROOT,
    )
    process.stdin.write(json.dumps(finished))
    process.stdin.close()
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.read_bytes().endswith(b"\n")
    assert record.read(path) == [finished, finished]
    record.Writer(path).write(finished)
    assert record.read(path) == [finished] * 3 and path.read_bytes().count(b"\n") == 3


def test_a_killed_run_is_resumed(tmp_path):
    """After SIGKILL behind the first record every line of the file is a record, and --resume measures only the rest."""
    path = tmp_path / "a.jsonl"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-m", "retro_bench", *RUN, "--json", str(path)],
        cwd=environment.ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
    )
    while not (path.exists() and path.read_bytes().count(b"\n") > 1) and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = record.read(path)
    assert kept and all(record.validate(r) == [] for r in kept)
    assert retro_bench.main([*RUN, "--resume", str(path)]) == 0
    records = record.read(path)
    assert records[: len(kept)] == kept
    ours = {r["id"] for r in records if r["backend"] == "reference" and r["time"]}
    assert len(ours) == 2 and record.left(path) == [], [(r["id"], r["status"], r["git"], r["reason"]) for r in records]
    assert retro_bench.main([*RUN, "--resume", str(path)]) == 0 and record.read(path) == records


@pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile")
def test_static_keeps_what_was_compiled_before_it_was_stopped(tmp_path, monkeypatch):
    path, whole = tmp_path / "static.jsonl", triton_kernels.rows

    def interrupted(*arguments):
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(triton_kernels, "rows", interrupted)
    command = ["static", "--arch", "90", "--launch", "leaky_scan:wide:sm90", "--jobs", "1", "--quiet"]
    assert retro_bench.main([*command, "--json", str(path)]) == exits.NOTHING_MEASURED
    (kept,) = record.read(path)
    assert record.validate(kept) == [] and kept["static"]["registers"] > 0


def test_an_incomplete_last_line_is_named(finished, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(finished) + "\n" + json.dumps(finished)[:99])
    assert retro_bench.main(["report", str(path)]) == exits.OK
    assert f"{path}: the last line is incomplete" in capsys.readouterr().err
    history = tmp_path / "history"
    retro_bench.main(["history", str(path), "--record", str(history)])
    assert f"{path}: the last line is incomplete" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_record_has_a_page(tmp_path):
    path, page = tmp_path / "a.jsonl", tmp_path / "a.html"
    record.Writer(path).request("run", ["leaky_average/cpu/b/float32/fwd"])
    assert retro_bench.main(["report", str(path), "--format", "html", "--output", str(page)]) == exits.OK
    assert "the run ended early" in page.read_text() and "leaky_average: b float32" in page.read_text()


def test_a_last_line_without_its_end_is_kept(finished, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(finished))
    record.Writer(path).write(finished)
    assert record.read(path) == [finished, finished] and not record.torn(path)


@pytest.mark.parametrize("made", [False, True])
def test_an_interruption_names_only_a_file_that_exists(tiny, tmp_path, monkeypatch, capsys, made):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(measuring, "walk" if made else "start", interrupted)
    if made:
        path.write_text("\n")
    assert retro_bench.main([*RUN, "--json", str(path)]) == exits.NOTHING_MEASURED
    said = capsys.readouterr().err
    assert (f"what was measured is in {path}" in said) == made and "interrupted" in said


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt; a worker of xdist ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_a_contender_swallows_ends_the_run(tiny, tmp_path, ctrl_c):
    path = tmp_path / "a.jsonl"

    def swallows(**arguments):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return wrong(1.0).function(**arguments)

    for name in ("first", "second"):
        retro_bench.register(retro_bench.Contender("relative_attention", name, swallows, role="ours"))
    command = ["check", *QUICK, "--json", str(path), "--backend", "first,second", "--baselines", "none"]
    assert retro_bench.main(command) == exits.NOTHING_MEASURED
    assert {r["backend"] for r in record.read(path)} <= {"eager"}


def test_a_contender_is_recorded_before_the_next_one_runs(tiny, tmp_path):
    """A process that is killed loses at most the contender that is running."""
    path, seen = tmp_path / "a.jsonl", []

    def looks(**arguments):
        if path.exists():
            seen.append({r["backend"] for r in record.read(path)})
        return wrong(1.0).function(**arguments)

    for name in ("first", "second"):
        retro_bench.register(retro_bench.Contender("relative_attention", name, looks, role="ours"))
    command = ["run", *QUICK, "--json", str(path), "--no-ceilings", "--backend", "first,second", "--mode", "fwd"]
    assert retro_bench.main(command) == exits.OK
    assert {"eager"} in seen and {"eager", "first"} in seen and len(record.requested(path)) >= 3


def test_a_contender_that_was_checked_and_not_timed_is_missing(finished, tmp_path):
    path, checked = tmp_path / "a.jsonl", finished | {"mode": "fwd", "id": finished["id"].replace("/check", "/fwd")}
    writer = record.Writer(path)
    writer.request("run", [checked["id"]])
    for one, missing in ((checked, 1), (checked | {"time": samples.summary([1.0], {"clock": "wall"})}, 0)):
        writer.write(one)
        assert len(record.left(path)) == len(summary.left_out(writer.requested, [one])) == missing
    assert record.latest(record.read(path))[checked["id"]]["time"]
