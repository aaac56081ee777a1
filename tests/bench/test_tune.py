"""The tuner: which tiles it tries, that it never keeps a wrong or failing one, and that a table changes in one line."""

import functools
import json

import pytest

import retro_bench
from ptx_emulator.machines import MACHINES
from retro_bench.measure import samples, timing, tune
from retro_bench.static import tiles as static_tiles
from retro_kernels.compile import tiles
from retro_kernels.compile.target import KNOWN
from retro_kernels.core import layouts
from tests.fresh import python

OP = "leaky_average"
ROW = tiles.table(OP)[0]


class FakeBench(tune.Bench):
    """Times and faults by a rule instead of from kernels."""

    def __init__(self, seconds, fault=lambda row: None):
        self.seconds, self.rule = seconds, fault
        self.run = type("Run", (), {"device": "cpu", "effort": timing.Effort(least=1, most=1)})

    def rows(self):
        return [(OP, ROW)]

    def now(self):
        return tiles.table(OP)[0]

    def fault(self):
        return self.rule(self.now())

    def call(self):
        return self.now


@pytest.fixture
def by_rule(monkeypatch):
    """Set up calls that return the current row; the bench gives its time."""

    def measure(calls, device, effort):
        return {name: samples.summary([bench_seconds(call())], {"clock": "wall"}) for name, call in calls.items()}

    monkeypatch.setattr(timing, "measure", measure)

    def use(bench):
        nonlocal bench_seconds
        bench_seconds = bench.seconds
        return bench

    bench_seconds = None
    return use


def distance(row):
    """Time that is least at 64 x 256 with 8 warps, several steps from the committed row."""
    best = {"block_m": 64, "block_n": 256, "num_warps": 8}
    return 1 + sum(abs(row[name].bit_length() - size.bit_length()) for name, size in best.items())


def test_neighbours_are_within_bounds_and_differ_in_one_or_two_numbers():
    rows = tune.neighbours(ROW)
    assert len({json.dumps(row) for row in rows}) == len(rows) > 10
    for row in rows:
        assert 1 <= sum(row[name] != ROW[name] for name in ROW) <= 2
        assert row["block_m"] >= 16 and row["block_n"] >= 16 and row["num_warps"] >= 1 and row["num_stages"] >= 1
        assert all(row[name] == ROW[name] for name in ("kernel", "arch", "bytes", "width", "rows"))


def test_the_rows_of_topk_chunks_keep_what_they_are_chosen_by():
    row = tiles.table("topk_chunks")[0]
    assert {new["block_m"] for new in tune.neighbours(row)} == {row["block_m"]} and "block_d" in row


def test_the_walk_ends_at_the_fastest_tile(by_rule):
    (best,) = tune.tune(by_rule(FakeBench(distance)), 9, lambda text: None)
    assert (best.best.row["block_m"], best.best.row["block_n"], best.best.row["num_warps"]) == (64, 256, 8)
    assert best.before == ROW == best.trials[0].row and best.best.seconds == 1
    assert tiles.table(OP)[0] == ROW  # the table is restored


def test_rounds_bound_the_walk(by_rule):
    (best,) = tune.tune(by_rule(FakeBench(distance)), 1, lambda text: None)
    assert best.best.seconds > 1 and len(best.trials) == 1 + len(tune.neighbours(ROW))


def test_a_wrong_tile_is_not_kept_however_fast(by_rule):
    wrong = lambda row: ("numerics", "out: too far") if row["num_warps"] == 8 else None  # noqa: E731
    (best,) = tune.tune(by_rule(FakeBench(distance, wrong)), 9, lambda text: None)
    assert best.best.row["num_warps"] == 4 and any(t.status == "numerics" and t.seconds is None for t in best.trials)


def test_a_gain_within_the_noise_changes_nothing(by_rule):
    (best,) = tune.tune(by_rule(FakeBench(lambda row: 1.0 if row == ROW else 0.99)), 9, lambda text: None)
    assert best.best.row == ROW


def test_a_committed_tile_that_fails_is_an_error(by_rule):
    with pytest.raises(ValueError, match=r"leaky_average scan.*numerics"):
        tune.tune(by_rule(FakeBench(distance, lambda row: ("numerics", "out: too far"))), 9, lambda text: None)


def test_watched_and_replaced():
    problem = tiles.TileQuery("scan", 2, 64, 512, 64)
    layouts.once(("tile",), (1,), lambda: "an earlier choice")
    with tiles.watched() as seen:
        assert layouts.once(("tile",), (1,), lambda: "a new choice") == "a new choice"  # so that its row is seen
        first = tiles.choose_tile(OP, problem, KNOWN[90])
        tiles.choose_tile(OP, problem, KNOWN[90])
    ((op, row),) = seen
    assert op == OP and row in tiles.table(OP)
    with tune.in_place(OP, [(row, {**row, "num_warps": 2})]):
        assert tiles.choose_tile(OP, problem, KNOWN[90]).num_warps == 2
    assert tiles.choose_tile(OP, problem, KNOWN[90]) == first and first.num_warps != 2


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the op's table, in the place of the committed one."""
    table = tmp_path / OP / "tiles.json"
    table.parent.mkdir()
    table.write_text((tiles._OPS / OP / "tiles.json").read_text())
    monkeypatch.setattr(tiles, "_OPS", tmp_path)
    yield table
    monkeypatch.undo()
    tiles.reread()


def test_keep_changes_one_line(copied):
    before = copied.read_text().splitlines()
    tiles.write_row(OP, ROW, {**ROW, "num_warps": 1})
    (changed,) = [new for old, new in zip(before, copied.read_text().splitlines(), strict=True) if old != new]
    assert json.loads(changed.rstrip(","))["num_warps"] == 1
    with pytest.raises(ValueError, match="expected one row"):
        tiles.write_row(OP, ROW, ROW)


@pytest.mark.nightly
def test_the_command_tunes_interpreted_kernels(tmp_path):
    """Times mean nothing in the interpreter; kernels run, are checked and are replaced."""
    path, interpreted = tmp_path / "tuned.jsonl", {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = ["-m", "retro_bench", "tune", "--device", "cpu", "--plugin", "tests.bench.tune_case", "--json", path]
    command += ["--op", OP, "--case", "tiny", "--dtype", "float32", "--seconds", "0.001", "--rounds", "1"]
    (line,) = [line for line in python(*command, **interpreted).splitlines() if line.startswith("leaky_average scan")]
    assert line.split()[-1] == "0" and int(line.split()[-2]) > 10  # no tile failed
    kept = path.read_text()
    assert python(*command, **interpreted) == "" and path.read_text() == kept  # tuned before


def test_a_machine_that_cannot_run_the_kernels_tunes_nothing(capsys):
    assert retro_bench.main(["tune", "--device", "cpu", "--op", OP, "--case", "mosaics"]) == 5
    assert "no CUDA GPU" in capsys.readouterr().err


def test_other_backends_and_baselines_are_refused(capsys):
    for arguments in (["--backend", "cpu"], ["--baselines", "all"]):
        assert retro_bench.main(["tune", "--device", "cpu", "--op", OP, *arguments]) == 4
        assert "--backend, --baselines" in capsys.readouterr().err


STATIC = dict(rounds=9, say=lambda text: None, over=lambda: False)
STATIC_CALL = OP, "wide", "bfloat16", MACHINES["H200"]


def predicted(row, launches, machine, base=False):
    """Set up estimates of tiles by the rule of `distance`; tiles of 8 warps spill."""
    assert launches and all(launch.num_warps == row["num_warps"] for launch in launches if "scan" in launch.name)
    if row["num_warps"] == 8 and not base:
        return tune.Trial(row, "error", reason="16 bytes of stack")
    return tune.Trial(row, "ok", distance(row))


def test_without_a_gpu_the_walk_ends_at_the_tile_predicted_fastest_that_does_not_spill():
    tuned = list(static_tiles.tune(*STATIC_CALL, **STATIC, judge=predicted))
    assert [item.before for item in tuned] == static_tiles.rows_of(*STATIC_CALL[:3], 90)
    for item in tuned:
        assert item.best.row["num_warps"] == 4 and item.best.row["block_n"] == 256
        assert any(trial.reason == "16 bytes of stack" for trial in item.trials)
        assert item.before in tiles.table(OP)  # the table is restored


def test_launches_that_follow_from_a_tile_count_by_their_difference(monkeypatch):
    """The products over the stored tiles depend on the query block; at one second per launch all tiles are equal."""
    told = []

    def a_second_each(row, launches, machine, base=False):
        told.append({launch.name for launch in launches})
        return tune.Trial(row, "ok", float(len(launches)))

    mine = dict(block_m=32, block_n=64, num_warps=4, num_stages=2)
    monkeypatch.setattr(tune, "neighbours", lambda row: [row | mine])
    call = "relative_attention", "causal d64", "bfloat16", MACHINES["H200"]
    tuned = static_tiles.tune(*call, **STATIC, judge=a_second_each)
    item = next(item for item in tuned if item.before["kernel"] == "query_rel" or told.clear())
    assert told[0] == {"relative_query"} and "relative_columns" in told[1] & told[2]
    assert [trial.seconds for trial in item.trials] == [4.0, 4.0]


def test_a_ranking_is_recorded_for_its_gpu_and_not_made_twice(monkeypatch, tmp_path, capsys):
    path = tmp_path / "ranked.jsonl"
    monkeypatch.setattr(static_tiles, "tune", functools.partial(static_tiles.tune, judge=predicted))
    command = ["tune", "--static", "--op", OP, "--case", "wide", "--machine", "A100", "--json", str(path)]
    assert retro_bench.main(command) == retro_bench.main(command) == 0
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["tuned"] == f"{OP}/wide/bfloat16/A100" and line["rows"][0]["before"]["arch"] == 80
    assert {"tile", "seconds"} == line["rows"][0]["trials"][0].keys()
    assert any("16 bytes of stack" in trial.get("reason", "") for trial in line["rows"][0]["trials"])
    assert "predicted for one A100" in capsys.readouterr().out
    assert retro_bench.main([*command[:-4], "--machine", "H"]) == 4


def test_a_row_that_is_predicted_serves_as_any_other(copied):
    tiles.write_row(OP, ROW, {**ROW, "num_warps": 1, "predicted": True})
    problem = tiles.TileQuery(ROW["kernel"], ROW["bytes"], ROW["width"], ROW["rows"], 64)
    assert tiles.choose_tile(OP, problem, KNOWN[ROW["arch"]]).num_warps == 1
