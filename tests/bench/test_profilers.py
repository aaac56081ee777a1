"""`profile` beside other people's profilers and clocks: recipes that parse, calls in ranges, CSV, a
choice of metrics.
"""

import csv
import shlex

import pytest
import torch

import bench.__main__ as command_line
from bench.measure import ceilings, profilers, runner
from bench.measure import choose as plan
from bench.records import environment, record
from bench.report import summary

from .test_run import PROFILE, QUICK


def test_every_recipe_runs_a_command_of_ours():
    recipes = profilers.recipes(["--kernel", "topk_chunks", "--mode", "fwd"])
    lines = [line for line in recipes.values() if "-m bench" in line]
    assert [line.split()[0] for line in lines] == ["ncu", "nsys", "python"] and "ncu --import" in recipes[
        "the same as CSV"
    ]
    for line in lines:
        words = shlex.split(line.split("&&")[0])
        ours = words[words.index("bench") + 1 :]
        parsed = command_line.parser("profile").parse_args(ours)
        assert parsed.kernel == ("topk_chunks",) and parsed.mode == ("fwd",) and parsed.calls >= 1 and "--calls" in ours


def test_recipes_are_printed_and_nothing_runs(tiny, capsys, monkeypatch):
    monkeypatch.setattr(ceilings, "measure", lambda device: pytest.fail("it measured"))
    assert command_line.main(["profile", "--recipes", "--device", "cpu", "--kernel", "relative_attention"]) == 0
    assert "--kernel relative_attention" in capsys.readouterr().out


def test_each_kernel_is_called_inside_its_range_and_the_profilers_window(tiny, monkeypatch):
    """As on a GPU, with the driver's calls replaced: warm-ups stand outside, the calls inside."""
    seen = []
    monkeypatch.setattr(runner, "step", lambda *_: lambda: seen.append("call"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    real = list(
        profilers.kernels(
            plan.Selection("cpu", ("relative_attention",), ("reference",), ("tiny",), ("float32",), ("fwd",))
        )
    )
    monkeypatch.setattr(profilers, "kernels", lambda selection: [(*real[0][:2], _OnCpu(real[0][2]), *real[0][3:])])
    assert profilers.calls(plan.Selection("cuda"), 3, 0, quiet=True) == 1
    name = "relative_attention/reference/tiny/float32/fwd"
    assert seen == ["call"] * profilers.WARMUPS + ["start", name, *["call"] * 3, "pop", "stop"]


class _OnCpu:
    """A case whose tensors are made on the CPU, whatever the device."""

    def __init__(self, case):
        self.case = case

    def make(self, seed, device, dtype):
        return self.case.make(seed, "cpu", dtype)


def test_a_range_ends_with_an_error_too(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with pytest.raises(ValueError, match="by itself"), profilers.named_range("a", "cuda"):
        raise ValueError("by itself")
    with profilers.named_range("b", "cpu"):
        pass
    assert seen == ["a", "pop"]


def test_calls_on_this_machine(tiny, capsys):
    quiet = [word for word in QUICK if word != "--quiet"]
    assert command_line.main(["profile", *quiet, "--backend", "reference", "--mode", "fwd", "--calls", "2"]) == 0
    assert capsys.readouterr().out.split() == ["relative_attention/reference/tiny/float32/fwd"]


def test_csv_metrics_and_the_other_clock(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ceilings, "measure", lambda device: None)
    monkeypatch.setattr(profilers, "other_clock", lambda call, device: call() is None or 0.5)
    path = tmp_path / "a.csv"
    options = ["--metrics", "time,clock", "--csv", str(path), "--cross-check", "--json", str(tmp_path / "a.jsonl")]
    assert command_line.main([*PROFILE, *options]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("measurement"))
    assert head.split("  ")[0] == "measurement" and "other clock" in head and "roofline" not in head
    (row,) = csv.DictReader(path.open())
    (kept,) = [r for r in record.read(tmp_path / "a.jsonl") if r["backend"] == "reference"]
    assert (
        row["id"] == kept["id"] and float(row["flops"]) == kept["work"]["flops"] and float(row["other_clock_s"]) == 0.5
    )
    assert float(row["seconds"]) == summary.rows([kept])[0].seconds and row["roofline"] == ""


@pytest.mark.parametrize(("rehearsal", "code"), [(None, 3), ("1", 0)])
def test_a_rehearsal_is_not_judged_by_its_ceilings(tiny, monkeypatch, capsys, rehearsal, code):
    """They are measured while other work runs, which pulls them down."""
    monkeypatch.setattr(ceilings, "measure", lambda device: None)
    monkeypatch.setattr(summary, "beyond", lambda records: "a share above 100%")
    monkeypatch.delenv(environment.REHEARSAL, raising=False)
    if rehearsal:
        monkeypatch.setenv(environment.REHEARSAL, rehearsal)
    assert command_line.main(PROFILE) == code and "above 100%" in capsys.readouterr().err


def test_the_other_clock_calls_what_it_times():
    seen = []
    assert profilers.other_clock(lambda: seen.append(torch.ones(2).sum()), "cpu") > 0 and len(seen) > 1


@pytest.mark.parametrize("wrong", [["--metrics", "speed"], ["--proton", "x"]])
def test_what_cannot_be_asked_is_named(tiny, wrong, capsys):
    assert command_line.main([*PROFILE, *wrong]) == 4 and wrong[0] in capsys.readouterr().err
