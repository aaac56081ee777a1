"""Records over commits: which are kept, where a level changed, a drift spread over many commits."""

import itertools
import random

import retro_bench
from retro_bench.commands import history
from retro_bench.records import record
from tests.bench.helpers import timed


def run_of(number, seconds):
    one = timed(seconds=seconds) | {"run": f"run{number}", "at": f"2026-01-{number + 1:02d}T00:00:00+00:00"}
    return one | {"git": {"sha": f"{number:040x}", "dirty": False}}


def test_a_step_is_found_and_noise_is_none():
    for seed in range(50):
        noise = random.Random(seed)
        flat = [1e-3 * (1 + noise.gauss(0, 0.01)) for _ in range(30)]
        assert history.points(flat) == [], seed
        stepped = [t * (1.1 if i >= 18 else 1) for i, t in enumerate(flat)]
        (found,) = history.points(stepped)
        assert abs(found - 18) <= 1, (seed, found)


def test_a_drift_that_no_commit_shows_is_named():
    times = [1e-3 * 1.006**i for i in range(20)]
    assert max(b / a for a, b in itertools.pairwise(times)) < history.SHIFT and history.drift(times) > 1.05


def test_records_are_kept_once_and_changes_named(tmp_path, capsys):
    for number in range(8):
        record.Writer(tmp_path / "run.jsonl").write(run_of(number, 1e-3 if number < 4 else 1.3e-3))
    command = ["history", str(tmp_path / "run.jsonl"), "--record", str(tmp_path / "kept")]
    assert retro_bench.main(command) == 0 and retro_bench.main(command) == 5  # no record twice
    assert retro_bench.main(["history", "--report", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    assert "8 records added" in out and f"{4:040x}"[:9] + " 1.30x" in out


def test_machines_have_lines_of_their_own(tmp_path, capsys):
    there = run_of(1, 2e-3)
    there["device"] = there["device"] | {"name": "another"}
    for one in (run_of(0, 1e-3), there):
        record.Writer(tmp_path / "history.jsonl").write(one)
    assert retro_bench.main(["history", "--report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("a/float32/fwd") == 2


def test_cases_of_one_name_have_lines_of_their_own(tmp_path, capsys):
    for number in range(2):
        one = run_of(number, 1e-3 * (number + 1))
        record.Writer(tmp_path / "history.jsonl").write(one | {"case": {"name": "a", "shape": {"N": 8 + number}}})
    assert retro_bench.main(["history", "--report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "a/float32/fwd N=8" in said.out and "a/float32/fwd N=9" in said.out and "2 different cases" in said.err


def test_what_cannot_be_is_said(tmp_path, capsys):
    assert retro_bench.main(["history", "--report", str(tmp_path)]) == 4
    assert retro_bench.main(["history", "--record", str(tmp_path)]) == 4
    assert retro_bench.main(["history"]) == 4
