"""The stages of the first hours on a GPU, with a stand-in for processes: which steps run, are skipped, are resumed."""

import argparse
import json
import os
import shlex
import sys
import time

import pytest

import retro_bench
from retro_bench.__main__ import parser
from retro_bench.commands import exits
from retro_bench.commands import gpu as gpu_command
from retro_bench.measure import choose as plan
from retro_bench.measure import predictions
from retro_bench.records import environment, record
from tests.conftest import COMPILED, INTERPRETER

STEPS = [pytest.param(step, id=step.name) for steps in gpu_command.STAGES.values() for step in steps]


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_every_command_is_accepted_and_its_cases_exist(step, rehearse, tmp_path):
    words = gpu_command.words(step, argparse.Namespace(out=tmp_path, rehearse=rehearse, again=False), 99.5)
    assert words[0] == (step.tool if step.tool not in (None, "python") else words[0])
    assert not any("{" in word for word in words)
    if step.tool == "python":
        return
    words_after = words[words.index("retro_bench") + 1 :]
    arguments = parser().parse_args(words_after)
    names = getattr(arguments, "case", None)
    if names:
        device = "cpu" if rehearse else "cuda"
        cases = plan.cases(plan.Selection(device, cases=names))
        assert {case.name for case in cases} == set(names)
        attentions = {"chunked_cross_attention", "relative_attention"}
        assert {case.op for case in cases} >= attentions | {"topk_chunks", "leaky_average"}


class Processes:
    """Stand-in for `supervised`: records each request and returns an exit code by the command's name."""

    def __init__(self, **codes):
        self.asked, self.codes = [], codes

    def __call__(self, command, log, variables, seconds):
        self.asked.append(shlex.join(command))
        self.variables = variables
        return self.codes.get(command[3] if command[1:3] == ["-m", "retro_bench"] else command[0], 0)


def test_a_stage_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    first, second, third = Processes(report=exits.INCONCLUSIVE), Processes(), Processes()
    out = ["--out", str(tmp_path / "gpu"), "--rehearse"]
    monkeypatch.setattr(gpu_command, "supervised", first)
    assert retro_bench.main(["gpu", "fast", *out]) == 3 and len(first.asked) == 6
    state = json.loads((tmp_path / "gpu" / "fast.json").read_text())
    done = dict.fromkeys(("headline", "predictions", "baselines", "host time", "all"), 0)
    assert state == done | {"table": "exit code 3"}
    monkeypatch.setattr(gpu_command, "supervised", second)
    assert retro_bench.main(["gpu", "fast", *out]) == 0 and len(second.asked) == 1 and " report " in second.asked[0]
    monkeypatch.setattr(gpu_command, "supervised", third)
    assert retro_bench.main(["gpu", "fast", *out, "--again"]) == 0 and len(third.asked) == 6
    assert "done before" in capsys.readouterr().err


def test_an_interrupted_step_goes_on_with_its_records(tmp_path):
    """run and tune measure only what their files lack; --again starts over."""
    step = next(step for step in gpu_command.STAGES["fast"] if step.name == "headline")

    def command(again):
        options = argparse.Namespace(out=tmp_path, rehearse=False, again=again)
        return shlex.join(gpu_command.words(step, options, 99.5))

    assert f"--json {tmp_path}/run.jsonl --fresh" in command(again=False)
    (tmp_path / "run.jsonl").touch()
    assert f"--resume {tmp_path}/run.jsonl" in command(again=False)
    assert "--resume" not in command(again=True) and "--fresh" in command(again=True)


def test_a_step_that_reached_its_time_limit_runs_again(tmp_path, monkeypatch):
    """`run` then exits with 0, and its file shows the cases that the limit left out."""
    file, asked = tmp_path / "run.jsonl", "relative_attention/triton/decode/float32/fwd"

    def supervised(command, log, variables, seconds):
        if "--json" in command and str(file) in command:
            record.Writer(file).request("r", [asked])
        return exits.OK

    monkeypatch.setattr(gpu_command, "supervised", supervised)
    assert retro_bench.main(["gpu", "fast", "--out", str(tmp_path), "--rehearse"]) == exits.INCONCLUSIVE
    state = json.loads((tmp_path / "fast.json").read_text())
    assert state["headline"] == "exit code 3" and state["host time"] == exits.OK


@pytest.mark.parametrize("name", gpu_command.STAGES)
def test_a_stage_says_its_time_before_it_begins(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_command, "supervised", Processes())
    retro_bench.main(["gpu", name, "--out", str(tmp_path), "--rehearse"])
    assert sum(step.seconds for step in gpu_command.STAGES[name]) < 600
    assert capsys.readouterr().err.startswith(f"{name}: {len(gpu_command.STAGES[name])} steps, about ")


def test_a_late_steps_children_end_with_it(tmp_path):
    """A profiler's child that runs on would use the GPU during the next timing."""
    said = tmp_path / "pid"
    child = f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with open(tmp_path / "log", "w") as log:
        assert gpu_command.supervised([sys.executable, "-c", parent], log, {}, 3.0) == exits.INCONCLUSIVE
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has reaped it
            os.kill(int(said.read_text()), 0)
            time.sleep(0.05)


def test_memcheck_sees_tensors_apart(tmp_path, monkeypatch):
    (step,) = (step for step in gpu_command.STAGES["right"] if step.name == "memory errors")
    seen = Processes()
    monkeypatch.setattr(gpu_command, "supervised", seen)
    gpu_command.run(step, argparse.Namespace(out=tmp_path, rehearse=False, again=False), 9.0)
    assert seen.variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def prediction(machine, microseconds, fingerprint="a"):
    row = {"mode": "model", "id": "leaky_average/triton/leaky_scan:wide:sm90/bfloat16/static", "machine": machine}
    return row | {"fingerprint": fingerprint, "predicted_us": microseconds, "bound": "L2"}


def test_predictions_are_the_newest_of_this_machine(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    for name, *row in (("22", "H200", 1.0), ("22-later", "H200", 2.0), ("23", "A100", 3.0)):
        (folder / f"predicted-h200-2026-11-{name}.jsonl").write_text(json.dumps(prediction(*row)) + "\n")
    (row,) = predictions.newest(folder, "NVIDIA H200").values()
    assert row["predicted_us"] == 2.0
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "device", lambda kind: {"name": "NVIDIA L40S"})
    assert predictions.main("cuda", "9", str(tmp_path / "out")) == exits.NOTHING_MEASURED
    assert "no estimates for NVIDIA L40S" in capsys.readouterr().err


def test_a_wrong_kernel_ends_red_and_a_tool_that_is_absent_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_command, "supervised", Processes(check=exits.NUMERICS))
    monkeypatch.setattr(gpu_command.shutil, "which", lambda name: None)
    assert retro_bench.main(["gpu", "right", "--out", str(tmp_path), "--rehearse"]) == 2
    assert "compute-sanitizer is not installed" in capsys.readouterr().err
    state = json.loads((tmp_path / "right.json").read_text())
    assert state["races"] == "compute-sanitizer is not installed" and state["check"] == exits.NUMERICS


def test_a_tool_that_breaks_stops_nothing_and_is_tried_again(tmp_path, monkeypatch):
    processes = Processes(**{"compute-sanitizer": 1})
    monkeypatch.setattr(gpu_command, "supervised", processes)
    monkeypatch.setattr(gpu_command.shutil, "which", lambda name: name)
    assert retro_bench.main(["gpu", "right", "--out", str(tmp_path)]) == exits.INCONCLUSIVE
    assert len(processes.asked) == len(gpu_command.STAGES["right"])
    assert json.loads((tmp_path / "right.json").read_text())["races"] == "exit code 1"
    processes.asked.clear()
    assert retro_bench.main(["gpu", "right", "--out", str(tmp_path)]) == exits.INCONCLUSIVE
    assert len(processes.asked) == 2 and all(command.startswith("compute-sanitizer") for command in processes.asked)


def test_a_rehearsals_records_are_no_results(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.jsonl"
    line = json.loads((environment.ROOT / "bench/results/cpu-zen5-2core-2026-11-23.jsonl").read_text().splitlines()[0])
    file.write_text(json.dumps(line | {"environment": line["environment"] | {"rehearsal": True}}) + "\n")
    assert retro_bench.main(["report", str(file)]) == exits.USAGE
    assert "expected measured records; got those of a rehearsal" in capsys.readouterr().err
    monkeypatch.setenv(environment.REHEARSAL, "1")
    assert retro_bench.main(["report", str(file)]) == exits.OK


def test_no_step_starts_without_time(tmp_path, monkeypatch, capsys):
    asked = Processes()
    monkeypatch.setattr(gpu_command, "supervised", asked)
    assert retro_bench.main(["gpu", "tune", "--out", str(tmp_path), "--rehearse", "--deadline", "0"]) == 3
    assert "no time is left" in capsys.readouterr().err
    assert not asked.asked and not (tmp_path / "tune.json").exists()


@pytest.mark.skipif(INTERPRETER or COMPILED, reason="launches are replaced in this process")
def test_predictions_stand_beside_what_was_measured(tmp_path, capsys, monkeypatch):
    """A rehearsal, whose launches do nothing. A changed launch is distinguished from a launch that is gone."""
    pytest.importorskip("triton")
    from retro_kernels.compile import aot

    monkeypatch.setattr(aot, "ops", lambda: ["leaky_average"])
    row = {"mode": "model", "machine": "H200", "fingerprint": "another", "predicted_us": 10.0, "bound": "L2"}
    names = ("leaky_scan:wide", "leaky_scan:gone")
    folder, out = tmp_path / "bench" / "results", tmp_path / "measured.jsonl"
    folder.mkdir(parents=True)
    lines = [row | {"id": f"leaky_average/triton/{name}:sm90/bfloat16/static"} for name in names]
    (folder / "predicted-a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert predictions.main("cpu", "99", str(out)) == exits.OK
    said = capsys.readouterr()
    assert "leaky_scan:gone" in said.err and "changed since" in said.out and "of 1 within 25%" in said.out
    (measured,) = map(json.loads, out.read_text().splitlines())
    assert measured["measured_us"] > 0 and measured["predicted_us"] == 10.0 and not measured["same_code"]
    assert predictions.main("cpu", "0", str(out)) == exits.INCONCLUSIVE
    assert predictions.main("cpu", "99", str(out), "nothing") == exits.NOTHING_MEASURED
