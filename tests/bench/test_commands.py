"""Commands around a run: usage errors, plug-ins, doctor, profiler, list, and their exit codes."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

import retro_bench
from retro_bench.commands import doctor as doctor_command
from retro_bench.commands import emulator as emulator_command
from retro_bench.commands import estimate
from retro_bench.measure import runner
from retro_bench.ops import relative_attention as baselines
from retro_bench.records import environment, record
from retro_bench.report.tables import align
from tests.bench.helpers import PROFILE, QUICK, wrong
from tests.refusals import refused


def test_usage_errors_and_nothing_measured(tiny, tmp_path, capsys):
    assert retro_bench.main(["run", "--case", "no-such-case"]) == 4
    assert "matches none of" in capsys.readouterr().err
    assert retro_bench.main(["check", *QUICK, "--dtype", "int8"]) == 4
    assert retro_bench.main(["frobnicate"]) == 4
    assert retro_bench.main(["report", str(tmp_path / "absent.jsonl")]) == 4
    if not torch.cuda.is_available():
        assert retro_bench.main(["run", "--device", "cuda"]) == 4
    absent = dict(op="relative_attention", name="absent", role="ours", reason=lambda *_: "not built")
    retro_bench.register(retro_bench.Contender(**absent, function=wrong(1.0).function))
    assert retro_bench.main(["check", *QUICK, "--backend", "absent"]) == 5


def test_what_cannot_be_read_or_written_is_usage_not_a_regression(tiny, tmp_path, capsys):
    """Python's exit code for an exception is 1, which here means a regression."""
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "foreign").write_text('{"a": 1}\n')
    good, absent = str(tmp_path / "good.jsonl"), str(tmp_path / "no" / "such" / "folder")
    (tmp_path / "no").write_text("a file where a folder should be")
    assert retro_bench.main(["check", *QUICK, "--backend", "reference", "--json", good]) == 0
    for command, word in (
        (["check", *QUICK, "--json", absent], "no/such"),
        (["check", *QUICK, "--json", str(tmp_path)], "--json"),
        (["profile", *QUICK, "--json", absent], "no/such"),
        (["host", "--json", absent], "--json"),
        (["host", "--json", str(tmp_path)], "--json"),
        (["estimate", "--json", absent], "--json"),
        (["static", "--fingerprints", absent], "--fingerprints"),
        (["run", *QUICK, "--resume", str(tmp_path / "binary")], "binary"),
        (["run", *QUICK, "--resume", str(tmp_path / "foreign")], "foreign"),
        (["run", *QUICK, "--fresh"], "--fresh"),
        (["run", *QUICK, "--seconds", "-1"], "seconds"),
        (["run", *QUICK, "--seconds", "nan"], "seconds"),
        (["report", str(tmp_path / "binary")], "binary"),
        (["report", good, "--format", "md", "--output", absent], "--output"),
        (["ab", "--base", "HEAD", "--static-only", "--markdown", absent], "--markdown"),
        (["ab", "--base", "HEAD", "--static-only", "--arch", "12"], "12"),
        (["static", "--arch", "90,x"], "x"),
        (["static", "--only", good], "--only"),
        (["check", *QUICK, "--baselines", "nope"], "--baselines nope"),
        (["profile", *QUICK, "--device", "cpu", "--cuda-graph"], "--cuda-graph"),
        (["list", "--plugin", "no_such_module"], "no_such_module"),
    ):
        assert retro_bench.main(command) == 4, command
        assert word in capsys.readouterr().err, command


def test_doctor_says_what_to_fix(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command, "installed", lambda package: package != "faiss")
    monkeypatch.setattr("retro_kernels.extensions.unavailable", lambda name: f"{name} is not built")
    monkeypatch.setattr(doctor_command, "noise", lambda: 0.03)
    assert retro_bench.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("pip install faiss-cpu", "_cpu is not built", "3.0%", "stop it", "python", "torch")
    )
    assert "pip install rich" not in out
    monkeypatch.setattr(doctor_command, "noise", lambda: 0.2)
    assert retro_bench.main(["doctor"]) == 3 and "not fit" in capsys.readouterr().out
    monkeypatch.setattr(doctor_command, "remedies", lambda spread: [])
    assert retro_bench.main(["doctor", "--no-noise"]) == 0 and capsys.readouterr().out.endswith("to fix:\n  nothing\n")


def test_profile_leaves_a_trace_and_the_profilers_table(tiny, tmp_path, monkeypatch, capsys):
    assert retro_bench.main([*PROFILE, "--trace", str(tmp_path), "--json", str(tmp_path / "a.jsonl")]) == 0
    (trace,) = tmp_path.glob("*.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "retro_kernels::relative_attention" in trace.with_suffix(".txt").read_text()
    assert {r["backend"] for r in record.read(tmp_path / "a.jsonl")} == {"eager", "reference"}
    assert "tiny  float32  fwd   reference" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["profile", "run"])
def test_times_of_a_throttled_clock_are_not_recorded(tiny, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(environment, "throttled", lambda device: "heat, by the hardware")
    path, words = tmp_path / "a.jsonl", [command, *PROFILE[1:]]
    assert retro_bench.main([*words, "--json", str(path)]) == 3
    said = capsys.readouterr()
    assert "throttled (heat, by the hardware)" in said.err and "ms" not in said.out and " us" not in said.out
    assert not any(one["time"] for one in record.read(path))


def test_a_profile_that_is_interrupted_keeps_its_records(tiny, tmp_path, monkeypatch):
    def stops(**arguments):
        raise KeyboardInterrupt

    retro_bench.register(retro_bench.Contender("relative_attention", "stops", stops, role="ours"))
    path = tmp_path / "a.jsonl"
    command = ["profile", *QUICK, "--backend", "reference,stops", "--mode", "fwd", "--json", str(path)]
    assert retro_bench.main(command) == 5
    assert "reference" in {one["backend"] for one in record.read(path)} and record.left(path)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"clocks_event_reasons.active": "0x0000000000000000"}, None),
        ({"clocks_event_reasons.active": "0x0000000000000005"}, None),  # idle, and its power cap
        ({"clocks_event_reasons.active": "0x68"}, "hardware slow-down, heat, by the driver, heat, by the hardware"),
        ({"clocks_throttle_reasons.active": "0x0000000000000080"}, "power brake"),  # an older driver
        ({"clocks_event_reasons.active": "[Not Supported]"}, None),
        ({}, None),
    ],
)
def test_why_a_clock_is_throttled(monkeypatch, answers, why):
    monkeypatch.setattr(environment, "_output", lambda command: answers.get(command[3].removeprefix("--query-gpu=")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1-2-3"))
    assert environment.throttled("cuda") == why and environment.throttled("cpu") is None


def test_a_plugin_that_breaks_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "breaks.py").write_text("raise RuntimeError('by itself')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert retro_bench.main(["list", "--plugin", "breaks"]) == 4
    assert "--plugin breaks: RuntimeError: by itself" in capsys.readouterr().err


def test_what_calls_sys_exit_is_no_green_run(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert retro_bench.main(["check", *QUICK, "--plugin", "leaves"]) == 4
    assert "--plugin leaves: SystemExit" in capsys.readouterr().err

    def leaves(**arguments):
        raise SystemExit(0)

    retro_bench.register(retro_bench.Contender("relative_attention", "leaves", leaves, role="ours"))
    assert retro_bench.main(["check", *QUICK, "--backend", "leaves"]) == 6
    assert "sys.exit(0)" in capsys.readouterr().err


def test_a_fault_of_the_harness_is_no_verdict(tiny, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_case", lambda *_: 1 / 0)
    assert retro_bench.main(["check", *QUICK]) == 6
    assert "ZeroDivisionError" in (said := capsys.readouterr().err) and "no verdict" in said


def test_list_shows_every_kernel_and_the_reason(tiny, capsys):
    """Only topk_chunks has kernels in CUDA C++, and rms_norm has none for GPUs."""
    assert retro_bench.main(["list", "--device", "cpu"]) == 0
    parts = {part.split("\n")[0]: part for part in capsys.readouterr().out.split("\n\n")[1:]}
    assert set(parts) == set(retro_bench.OPERATORS) and "tiny" in parts["relative_attention"]
    assert "flex" in parts["relative_attention"] and "runs on cuda only" in parts["relative_attention"]
    assert " cuda " in parts["topk_chunks"] and sum("ours      cuda " in part for part in parts.values()) == 1
    assert "triton" not in parts["rms_norm"] and "ours      cpu " in parts["merge_attention"]


def test_tables_fit_a_terminal_of_80_columns(tiny, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert retro_bench.main(["list", "--device", "cpu"]) == 0
    assert retro_bench.main(PROFILE) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "tiny  float32  fwd   reference" in said
    cells = ("relative_attention_backward", "causal d64", "bfloat16", "m128 n64 w8 s2", "12.50", "1234.5", "1000.0")
    said = align([estimate.HEADER, (*cells, "1500.0", "tensor cores", "shared memory 72%")], estimate.DROP)
    assert max(map(len, said.splitlines())) <= 80 and "relative_attention_backward  causal d64" in said


def test_registered_names_are_checked(tables):
    refused("is taken", retro_bench.register, retro_bench.Contender("relative_attention", "eager", baselines.eager))
    refused("not an operator", retro_bench.register, retro_bench.Case("no_such_op", "a", {}, "a test"))
    refused("expected an Operator", retro_bench.register, "relative_attention", error=TypeError)

    def contender(**more):
        retro_bench.register(retro_bench.Contender("relative_attention", "mine", baselines.eager, **more))

    def case(name, shape, **more):
        retro_bench.register(retro_bench.Case("leaky_average", name, shape, "a test", **more))

    refused("names an unknown role, kernal; known: baseline, ours, reference", contender, role="kernal")
    refused("names an unknown device, gpu", contender, devices=("gpu",))
    shape = {"B": 1, "N": 8, "H": 2, "D": 16}
    refused("names an unknown mode, backward", case, "a", shape, modes=("backward",))
    refused(r"expected a name without '/'.*; got 'a/b'", case, "a/b", shape)
    refused("case 'a': leaky_average needs 'H' in its shape", case, "a", {"B": 1, "N": 8})
    assert not {key for key in (*retro_bench.CASES, *retro_bench.CONTENDERS) if key[1] in ("a", "a/b", "mine")}


@pytest.mark.parametrize("command", ["static", "emulate", "estimate", "tune --static --op topk_chunks --case wide"])
def test_a_command_that_needs_the_emulator_says_what_to_install(command, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert retro_bench.main(command.split()) == 4
    assert "needs ptx-emulator: pip install" in capsys.readouterr().err


def test_without_the_emulator_ab_judges_no_machine_code(monkeypatch, capsys):
    monkeypatch.setattr(emulator_command, "missing", lambda: emulator_command.INSTALL)
    assert retro_bench.main(["ab", "--base", "HEAD", "--static-only"]) == 6
    assert "static metrics: not compared: needs ptx-emulator" in capsys.readouterr().out


def test_an_operator_may_have_no_differentiable_input(tables, capsys):
    def operator(**more):
        build = {"build": lambda case, draw: {"x": draw.normal(2, 8)}}
        call = {"call": lambda given, backend: (given["x"] * 2,), "work": lambda *_: retro_bench.Work(1.0, 8.0)}
        retro_bench.register(retro_bench.Operator("fixed", ("y",), (), **build, **call, **more), replace=True)

    refused("operator 'fixed' has rows", operator, rows=lambda given, first, last: given)
    operator()
    with pytest.raises(ValueError, match=r"fixed has no differentiable input; pass modes=\('fwd',\)"):
        retro_bench.register(retro_bench.Case("fixed", "small", {"B": 2}, "a test"))
    retro_bench.register(retro_bench.Case("fixed", "small", {"B": 2}, "a test", modes=("fwd",)))
    retro_bench.register(retro_bench.Contender("fixed", "eager", lambda x: x * 2))
    for name, function, code in (("right", lambda x: x + x, 0), ("wider", lambda x: (x + x).double(), 2)):
        retro_bench.register(retro_bench.Contender("fixed", name, function, role="ours"))
        command = ["check", "--device", "cpu", "--op", "fixed", "--backend", name, "--dtype", "float32", "--quiet"]
        assert retro_bench.main(command) == code, capsys.readouterr().out
    assert "expected torch.float32 as the reference returns; got torch.float64" in capsys.readouterr().out
