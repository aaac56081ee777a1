"""What the gate catches: each contender gets its verdict, and an honest one is not blamed for another's fault."""

import pytest
import torch

import retro_bench
from retro_bench.check import numerics
from retro_bench.measure import trial
from retro_bench.records import record
from tests.bench import contenders

SEED = 3  # a wrong row is found where eager's own worst row is good enough, which depends on the values


def measured(tmp_path, command, names, dtype):
    path = tmp_path / "a.jsonl"
    words = [command, "--device", "cpu", "--quiet", "--op", contenders.OP, "--backend", ",".join(names)]
    words += ["--dtype", dtype, "--json", str(path), "--seed", str(SEED)]
    if command == "run":  # one call of a sample is compared
        words += ["--no-ceilings", "--samples", "60", "--seconds", "0.02"]
    code = retro_bench.main(words)
    return code, {r["backend"]: r for r in record.latest(record.read(path)).values()}


@pytest.mark.parametrize("entry", contenders.ENTRIES, ids=lambda entry: entry.name)
def test_a_contender_gets_its_verdict(tables, tmp_path, entry, monkeypatch):
    monkeypatch.setattr(trial, "COMPARED_S", 10.0)  # a machine with other work would leave comparisons out
    contenders.register()
    code, records = measured(tmp_path, "run", [entry.name], entry.dtype)
    one = records[entry.name]
    assert one["environment"]["threads"] == torch.get_num_threads() != 3
    if entry.words is None:
        assert code == 0 and one["status"] == "ok" and one["time"]
    else:
        assert code == 2 and one["status"] == "numerics_fail" and one["time"] is None, one["time"]
        assert entry.words in one["reason"]


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_contender_that_overwrites_an_input_is_blamed_and_the_next_is_not(tables, tmp_path, command):
    contenders.register()
    names = ["overwrites an input", "honest"]
    code, records = measured(tmp_path, command, names, "float32")
    assert code == 2 and records["honest"]["status"] == "ok", records["honest"]["reason"]
    assert "overwrites its input x" in records["overwrites an input"]["reason"]


def judged(
    first: numerics.Errors, further: list[numerics.Errors], eager: numerics.Errors, role: str = "ours"
) -> tuple[bool, bool]:
    """Return whether a contender with these errors passes, and whether further draws were asked for."""
    asked = []

    def more(_, like):
        asked.append(like)
        return [{"y": errors} for errors in further], [{"y": eager}] * len(further) if like else []

    answers = trial.Answers(None, "float32", None, {}, (), None, yardstick={"y": eager}, more=more)
    contender = retro_bench.Contender("op", "mine", lambda: None, role=role)
    return answers.verdict(contender, {"y": first}, "all").passed, bool(asked)


def test_a_worst_row_slightly_above_its_limit_is_judged_by_its_mean_over_further_draws():
    """The limit is twice eager's error, 2e-6, and two floors: 7.8e-6."""

    def passes(row, *further):
        made = [numerics.Errors(1e-6, 1e-6, x, 1e-4, 1e-6, 10.0) for x in (row, *further, 2e-6)]
        return judged(made[0], made[1:-1], made[-1])

    assert passes(7e-6) == (True, False)
    assert passes(9e-6, *[2e-6] * 16) == (True, True)
    assert passes(9e-6, *[8e-6] * 16) == (False, True)
    assert passes(1e-3, *[1e-6] * 16) == (False, False)


def test_a_sum_that_is_nearly_zero_in_one_draw_is_judged_by_its_usual_size():
    """Its exact value is 1e-4 in that draw and 1 in others. Eager is off by 1e-6 in all."""

    def off(by, size=1.0):
        return numerics.Errors(by / size, by, by / size, size=size)

    assert judged(off(1e-6, 1e-4), [off(1e-6)] * 16, off(1e-6)) == (True, True)
    assert judged(off(1e-4, 1e-4), [off(1e-4)] * 16, off(1e-6)) == (False, True)
    # a baseline has the limit 1e-3 in every draw
    assert judged(off(1e-6, 1e-4), [off(1e-6)] * 16, off(1e-6), "baseline") == (True, True)
    assert judged(off(1e-2), [off(1e-2)] * 16, off(1e-6), "baseline") == (False, True)
    assert judged(off(1e-6, 1e-4), [numerics.Errors(None, None)] * 16, off(1e-6)) == (False, True)
