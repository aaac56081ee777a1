"""What the gate catches: each contender gets its verdict, and an honest one is not blamed for another's fault."""

import pytest
import torch

import retro_bench
from retro_bench.records import record
from tests.bench import contenders

SEED = 3  # a wrong row is found where eager's own worst row is good enough, which depends on the values


def measured(tmp_path, command, names, dtype):
    path = tmp_path / "a.jsonl"
    words = [command, "--device", "cpu", "--quiet", "--op", contenders.OP, "--backend", ",".join(names)]
    words += ["--dtype", dtype, "--json", str(path), "--seed", str(SEED)]
    code = retro_bench.main([*words, "--no-ceilings", "--seconds", "0.02"] if command == "run" else words)
    return code, {r["backend"]: r for r in record.latest(record.read(path)).values()}


@pytest.mark.parametrize("entry", contenders.ENTRIES, ids=lambda entry: entry.name)
def test_a_contender_gets_its_verdict(tables, tmp_path, entry):
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
